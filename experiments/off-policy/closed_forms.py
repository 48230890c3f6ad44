"""Effect of one cycle of n updates to one sampler on a small step off π*, in closed form.

With a = learning rate·β, λ the eigenvalues of the Fisher information F at π* and K = KL(π*‖ref), to first order in the
policy's step δ and the sampler's δ_μ an expected update is

    full-sequence or prefix ratios, or a baseline and no ratio    −a·F·δ
    rewards from stale log-probs, full-sequence ratio             −a·F·δ_μ
    no ratio, the KL without a baseline                           −a·F·((1 − K)·δ + K·δ_μ)

since R − β·Σu is the same for all rollouts at π*, and E_μ[Σ_t g_t] = F·(δ_μ − δ). After n of them, δ_μ = δ at first:
"""

import math
from collections.abc import Mapping
from typing import Any

EXACT_RECIPES = ("sequence", "prefix-to-go", "none-centred")


def multiplier(row: Mapping[str, Any]) -> float | None:
    """The largest factor by which a cycle multiplies a small step; None where there is no closed form."""
    count, kl = row["updates"], row["kl"]
    factors = {
        **dict.fromkeys(EXACT_RECIPES, lambda step: (1 - step) ** count),
        "stale": lambda step: 1 - count * step,
        "none": lambda step: ((1 - step * (1 - kl)) ** count - kl) / (1 - kl),
    }
    if row["recipe"] not in factors:
        return None
    return max(abs(factors[row["recipe"]](row["rate"] * curvature)) for curvature in row["curvatures"])


def most_updates(row: Mapping[str, Any]) -> float:
    """So many updates to one sampler, and training with rewards from stale log-probs no longer settles."""
    return 2 / (row["rate"] * max(row["curvatures"]))


def ratio_free_settles(row: Mapping[str, Any]) -> bool | None:
    """Return True if training without ratios or a baseline for the KL settles as updates to one sampler increase.

    The factor (rⁿ − K)/(1 − K) tends to −K/(1 − K) where K < 1 and grows beyond all bounds where K > 1. None where
    so many updates are not yet enough to tell.
    """
    kl, power = row["kl"], math.exp(row["updates"] * row["rate"] * max(row["curvatures"]) * (row["kl"] - 1))
    if kl < 0.5:
        return True
    told = power < (2 * kl - 1) / 2 if kl < 1 else power > 2 * (2 * kl - 1)
    return False if told else None
