"""A binary autoregressive pair, after Shah et al. 2025, Fig. 2: how long, how far apart, how many samples.

Their parameters are unpublished. Ours: contexts are the start, a 0 and a 1. The reference says 1 with probability
1/2 at the start, 0.4 after a 0 and 0.6 after a 1; the policy's logit of a 1 is higher by s·(1, 2, 1/2). The scale s is
what sets the distance.
"""

from kltest.sweeps.settings import Settings

REFERENCE = (0.5, 0.4, 0.6)
DIRECTION = (1.0, 2.0, 0.5)

ESTIMATORS = ("k1-loss", "k2-loss", "k3-loss")
PLACEMENTS = ("loss", "reward", "both")
# Those that have no bias, and those that the source compares.
UNBIASED = (("k1-loss", "reward"), ("k1-loss", "both"), ("k3-loss", "both"))
PUBLISHED = (("k1-loss", "loss"), ("k1-loss", "reward"), ("k3-loss", "loss"), ("k3-loss", "reward"))

# Of one pair for all lengths, the KL is given at this length.
ANCHOR = 20
# Samples are drawn where the KL is held, from this length on.
SAMPLED = "kl"
SHORTEST = 5
# All 2^T sequences are enumerated as well up to here: a second route.
ENUMERATED = 10
# Random pairs: three contexts, logits of the reference and direction of the policy standard normal.
RANDOM_LENGTH = 10
# Where the two variances are equal is looked for between these distances.
BRACKET = (1e-3, 1.0)

PARTS: dict[str, tuple[str, ...]] = {
    "length": ("length", "kl", "hold", "batches", "samples", "every", "seed"),
    "order": ("length",),
    "random": ("kl", "pairs", "seed"),
}

SETTINGS = Settings(
    title="Bias and variance by length, after A Comedy of Estimators",
    tags=("exact", "sampled", "gradient", "variance"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "length": tuple(range(5, 21)),
        # KL(π‖ref) of whole sequences: near the reference, and where the order of the variances is another.
        "kl": (0.05, 0.8),
        # What stays as length grows: the KL of whole sequences, or the pair of policies.
        "hold": ("kl", "pair"),
        # The published 200 × 1,000: so many gradients, each the mean over so many rollouts.
        "batches": 200,
        "samples": 1000,
        # They are drawn at every so many lengths.
        "every": 3,
        "pairs": 100,
    },
    full={"kl": (0.0125, 0.05, 0.2, 0.8), "samples": 2000, "every": 1, "pairs": 500},
    seeds={"quick": 1, "full": 2},
    allowed={
        "length": (2, 40),
        "kl": (1e-4, 1.0),
        "batches": (10, 10_000),
        "samples": (10, 100_000),
        "every": (1, 20),
        "pairs": (1, 100_000),
    },
    # Without samples nothing is random, and once is enough.
    applies=lambda one: one["part"] != "length" or one["hold"] == SAMPLED or one["seed"] == 0,
)

# Sums of a few hundred to a few thousand terms by two routes in float64.
EXACT = 1e-10
