"""A KL penalty in groups of rollouts of one prompt: masks of ties, baselines, normalisation."""

from collections.abc import Mapping
from typing import Any

from kltest.sweeps.settings import Settings

# The environment: one prompt and four answers, of which the first is right. The reference's shares of the wrong ones.
WRONG = (0.5, 0.3, 0.2)

PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "masking": ("group_size", "success", "seed"),
    "baselines": ("group_size", "seed"),
    "std": ("push", "seed"),
    "training": {
        **{name: name for name in ("estimator", "group_size", "beta", "batch_size", "steps", "learning_rate", "seed")},
        "success": "trained_success",
    },
}

# Training takes one size of group.
TRAINED_SIZE = 4


def applies(one: Mapping[str, Any]) -> bool:
    """Baselines need groups; training takes one size of them, and exact training one seed, since nothing is random."""
    if one["part"] == "baselines":
        return bool(one["group_size"] > 1)
    if one["part"] == "training":
        return one["group_size"] == TRAINED_SIZE and bool(one["batch_size"] or one["seed"] == 0)
    return True


SETTINGS = Settings(
    title="Groups: masked ties, self-inclusive baselines, std-normalisation",
    tags=("exact", "gradient", "training", "groups"),
    parts=PARTS,
    applies=applies,
    values={
        "part": tuple(PARTS),
        "group_size": (1, 2, 4, 8),
        # Probability of the right answer, under the policy (masking) and under the reference (training).
        "success": (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98),
        "trained_success": (0.1, 0.5),
        # Coefficients at which the push of a tied group is measured.
        "push": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0),
        "estimator": ("k2-loss-sequence", "tied-groups-masked", "group-mean", "leave-one-out", "group-std"),
        "beta": (0.3, 0.5, 0.7, 1.0, 1.5),
        # 0: exact expectations.
        "batch_size": (0, 64),
        "steps": 1000,
        # Divided by β where that is above 1.
        "learning_rate": 2.0,
    },
    full={
        "group_size": (1, 2, 3, 4, 8, 16),
        "beta": (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0),
        "steps": 10_000,
        "trained_success": (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95),
    },
    seeds={"quick": 3, "full": 10},
    allowed={
        "group_size": (1, 16),
        "success": (0.001, 0.999),
        "trained_success": (0.001, 0.999),
        "push": (1e-9, 100.0),
        "beta": (0.05, 100.0),
        "batch_size": (0, 4096),
        "steps": (1, 1_000_000),
        "learning_rate": (1e-6, 100.0),
    },
)

# A few thousand terms of size one, by two routes in float64.
EXACT = 1e-11
