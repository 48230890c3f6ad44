"""Is the logged value an estimate of the KL, and which one?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kltest.environments import Instance
from kltest.grading.report import ValueRow
from kltest.moments import Expectation

# Means are compared after summing at most a few hundred terms in float64; float32 losses carry about 1e-7 a term.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def true_values(instance: Instance) -> dict[str, float]:
    """The three numbers that are called "the KL" in logs: E[Σu], E[Σu]/E[L] and E[Σu/L], under the policy."""
    paths = instance.paths
    weights = instance.rollout_weights("current")
    log_ratio = (instance.policy - instance.reference)[paths.contexts, paths.tokens]
    total, length = np.where(paths.mask, log_ratio, 0.0).sum(axis=1), paths.mask.sum(axis=1)
    kl = float(weights @ total)
    return {
        "kl": kl,
        "kl_per_token": kl / float(weights @ length),
        "mean_of_token_means": float(weights @ (total / length)),
    }


def value_row(
    environment: str, sampler: str, instances: Sequence[Instance], found: Sequence[Expectation], dtype: str
) -> ValueRow:
    """What the logged value equals in expectation on every instance; its worst bias and noise relative to the KL."""
    truths = [true_values(instance) for instance in instances]
    limit = TOLERANCE.get(dtype, 3e-2)
    matches = next(
        (
            name
            for name in truths[0]
            if all(abs(f.mean - t[name]) <= limit * abs(t[name]) for f, t in zip(found, truths, strict=True))
        ),
        None,
    )
    pairs = list(zip(found, truths, strict=True))
    bias = max(abs(f.mean - t["kl"]) / t["kl"] for f, t in pairs)
    return ValueRow(environment, sampler, matches, bias, max(f.std / t["kl"] for f, t in pairs))
