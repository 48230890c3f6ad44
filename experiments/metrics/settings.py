"""Quantities logged as the KL, and what they are: the parts and their grids."""

from kltest.sweeps.settings import Settings

# What each part varies; it takes no notice of the other settings.
PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "mutation": ("copied", "beta", "seed"),
    "controller": {"read": "read", "offset": "offset", "seed": "draw"},
    "reweighted": ("staleness", "seed"),
    "masked": {"group_size": "group_size", "success": "success", "seed": "draw"},
    "padding": ("padded_length", "seed"),
    "logged": ("beta", "seed"),
}

SETTINGS = Settings(
    title="Metrics: what is logged as the KL",
    tags=("exact", "metric", "training", "ragged", "groups"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        # Whether rewards are made from a copy of the KL that is logged, or in place.
        "copied": (False, True),
        "beta": (0.1, 0.5),
        # What an adaptive controller of β goes by, and what is added to every reward.
        "read": ("kl", "mutated", "k2", "scaled"),
        "offset": (-1.0, 1.0),
        # How far the sampler is from the policy: a bound on |log π/μ| of any rollout.
        "staleness": (0.1, 0.25, 0.5, 1.0, 2.0, 3.0),
        "group_size": (1, 2, 4, 8),
        # Probability of the right answer under the policy.
        "success": (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98),
        "padded_length": (4, 6, 8, 16, 32),
        # Rewards and references of the controller's bandit, and references of groups.
        "draw": 0,
    },
    full={
        "draw": tuple(range(10)),
        "beta": (0.03, 0.1, 0.3, 0.5, 1.0),
        "offset": (-2.0, -1.0, 1.0, 2.0),
        "group_size": (1, 2, 3, 4, 8, 16),
        "padded_length": (4, 5, 6, 8, 12, 16, 32, 64, 128),
    },
    seeds={"quick": 2, "full": 20},
    allowed={
        "beta": (0.01, 10.0),
        "offset": (-10.0, 10.0),
        "staleness": (0.01, 5.0),
        "group_size": (1, 16),
        "success": (0.001, 0.999),
        "padded_length": (4, 1000),
        "draw": (0, 1000),
    },
)

# Rollouts of up to so many tokens, the last of the vocabulary ending them; a reward of 1 or 0 for each token.
ENVIRONMENT = {"vocabulary": 3, "length": 4}

# Training with exact gradients, from the reference.
TRAINING = {"steps": 60, "learning_rate": 1.0}
# Updates of a longer run after which every estimator's mean and standard deviation are taken.
LOOKS = (1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 90, 135, 200)

# Ziegler et al. 2019, §2.2: β ← β·(1 + gain·clip(KL/target − 1, ±clip)). Here the policy is π* of β in each round.
CONTROLLER = {"target": 0.2, "clip": 0.2, "gain": 0.1, "start": 0.5, "rounds": 400, "every": 10}

# Groups: answers of which the first is right, with these chances under the first reference; others are drawn.
REFERENCE = (0.5, 0.25, 0.15, 0.1)

# Padding that is not zero: a log-ratio of this at dead positions.
GARBAGE = 0.5

# Two routes in float64 to sums of up to a few hundred terms of size one.
EXACT = 1e-11
