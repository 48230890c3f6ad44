"""Variance of unbiased KL gradients: sampling against expectations, baselines, credit, and what is left to gain.

A *random environment* here has a table of its own for every prefix: logits of the policy are normal with the standard
deviation `spread` (1 where nothing is said), those of the reference are the policy's plus normal noise of the standard
deviation `distance`.
"""

from collections.abc import Mapping
from typing import Any

from kltest.sweeps.settings import Settings

# The published pair: two binary tokens. The policy's first token is a coin's; after a 0 both models toss a coin,
# after a 1 the policy says 1 nearly always and the reference nearly never.
SURE = 0.01
# The reference's chance of a 0 at first, in the published pair.
PUBLISHED = 0.25

# The bandit of the baseline study: standard deviations of the reference's and of the start's log-probs.
ARMS = {"seed": 0, "count": 1000, "reference": 1.5, "start": 2.5}
RULES = ("0", "1", "value", "gradient")
RECORDED = 21
# The published learning rate at which medians are given, to this much.
PUBLISHED_RATE, MEDIAN_TOLERANCE = 5.0, 0.05

# Rates of failure are taken of environments of at most so many rollouts.
MOST = 512
# The ladder and the mixtures are of this vocabulary.
VOCABULARY = 3
# Mixtures are found by enumeration, up to this length.
MIXED_LENGTH = 4
# One environment of each cell of up to so many rollouts is enumerated as well, with the registered estimators.
ENUMERATED = 30

# Budgets: of these positions exact next-token KLs are computed, chosen by one of these rules. Variance is the optimal
# rule that knows nothing of what lies ahead. Environments are of this length.
SHARES = (0.05, 0.1, 0.25, 0.5)
RULES_OF_CHOICE = ("optimal", "variance", "entropy")
BUDGET_LENGTH = 6

# Exact KLs beside a reward: ascent with exact expectations on E[R] − β·KL, from the reference or from as far away.
PATHS = {"vocabulary": 3, "length": 3, "beta": 0.2, "learning_rate": 0.1, "updates": 64, "draws": 16}
STARTS = {"reference": 0.0, "away": 2.0}

# The record of a language model (language.csv): so many rollouts are measured after these updates, and after the last;
# of some of the last ones gradients at the weights are taken; shares of the positions; when it was made, with what, on
# CPUs.
LANGUAGE: Mapping[str, Any] = {
    "updates": (4, 12, 24, 48),
    "fewer": 2048,
    "rollouts": 8192,
    "differentiated": 384,
    "date": "2026-11-23",
    "python": "3.11",
    "torch": "2.13",
}
RECORDED_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)

PARTS: dict[str, tuple[str, ...]] = {
    "pair": ("reference", "samples"),
    "rates": ("vocabulary", "length", "distance", "spread", "environments", "seed"),
    "ladder": ("length", "distance", "compared", "seed"),
    "mixtures": ("length", "distance", "mixed", "seed"),
    "freedom": (),
    "noise": ("lam",),
    "bandit": ("rule", "rate", "steps", "batch_size", "runs"),
    "budget": ("distance", "spread", "budgeted", "seed"),
    "language": (),
    "reward": ("start", "made", "seed"),
}


def applies(one: Mapping[str, Any]) -> bool:
    """Random environments are small enough, and what is enumerated smaller still."""
    if one["part"] == "rates":
        return bool(one["vocabulary"] ** one["length"] <= MOST)
    return bool(one["part"] != "mixtures" or one["length"] <= MIXED_LENGTH)


SETTINGS = Settings(
    title="Variance of unbiased KL gradients: Rao–Blackwell, baselines, credit, and the least possible",
    tags=("exact", "sampled", "gradient", "variance", "training"),
    parts=PARTS,
    applies=applies,
    values={
        "part": tuple(PARTS),
        "reference": (*(round(0.05 * step, 2) for step in range(1, 20)),),
        "samples": 200_000,
        "vocabulary": (2, 3, 4, 8),
        "length": (2, 3, 4, 6, 8),
        "distance": (0.1, 0.3, 1.0, 3.0, 10.0),
        "spread": (1.0, 4.0),
        "environments": 1000,
        "compared": 50,
        # Environments in which mixtures are found.
        "mixed": 8,
        # Environments in which budgets are spent.
        "budgeted": 100,
        # Paths of training: where they start, and updates that the policy has made.
        "start": ("reference", "away"),
        "made": (1, 4, 16, 64),
        "lam": (*(0.25 * step for step in range(-2, 19)),),
        # The control variate's coefficient: fixed, or the best for value or gradient at every update.
        "rule": RULES,
        "rate": (5.0, 10.0, 20.0),
        "steps": 400,
        "batch_size": 16,
        "runs": 32,
    },
    full={
        "samples": 2_000_000,
        "distance": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        "spread": (1.0, 2.0, 4.0, 8.0),
        "environments": 10_000,
        "compared": 500,
        "mixed": 50,
        "budgeted": 500,
        "rate": (1.0, 2.0, 5.0, 7.0, 10.0, 12.0, 15.0, 20.0),
        "runs": 256,
    },
    seeds={"quick": 1, "full": 2},
    allowed={
        "reference": (0.001, 0.999),
        "samples": (1000, 100_000_000),
        "vocabulary": (2, 32),
        "length": (2, 10),
        "distance": (0.01, 30.0),
        "spread": (0.01, 8.0),
        "environments": (10, 1_000_000),
        "compared": (10, 100_000),
        "mixed": (1, 100_000),
        "budgeted": (10, 100_000),
        "made": (0, 64),
        "lam": (-5.0, 5.0),
        "rate": (1e-3, 100.0),
        "steps": (1, 100_000),
        "batch_size": (1, 4096),
        "runs": (1, 10_000),
    },
)

# Recursions against enumeration in float64: sums of up to a thousand terms.
EXACT = 1e-10
