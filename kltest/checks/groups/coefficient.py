"""Experiments on β: is the KL part of the gradient proportional to it, and if it is not, what is it instead?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kltest.checks.group_fixture import HALF_PRECISION, Bench, as_array, bench, called, norm
from kltest.identify.findings import Findings
from kltest.loss.outcome import Loss
from kltest.rollout import Rollout

# What is left of ℓ(β) − ℓ(0) after dividing by a small β is rounding in low precision.
FACTORS = {"float64": (0.001, 0.1, 0.5, 1.0, 2.0)}
FEW_FACTORS = (0.5, 1.0, 2.0)
NOTHING = 1e-12
PROPORTIONAL = {"float64": 1e-6, "float32": 1e-2}
# Two orders of magnitude, above what is commonly added to a standard deviation.
OVER = (0.02, 0.2, 2.0)
# A constant in a denominator leaves a few per cent where a cancelled coefficient should leave nothing.
ALIKE = 0.1

Kind = Literal["proportional", "ignored", "cancels", "other"]


@dataclass(frozen=True)
class Coefficient:
    """What β does: `strength[β]` is the size of the KL part of the gradient over its size at the β of the grading."""

    kind: Kind
    strength: dict[float, float]


def coefficient(findings: Findings) -> Coefficient:
    """How the KL part of the gradient depends on β, in one group of rollouts under a current sampler.

    It cancels where a group of equal rewards is pushed the same whatever β is, and other groups are not.
    """
    return findings.once(_coefficient)


def _coefficient(findings: Findings) -> Coefficient:
    loss: Any = findings.loss
    place, dtype = bench(findings), findings.observed.dtype
    untied = place.rollout(place.different, place.untied)
    base = loss.beta(untied)
    parts, moves = {}, False
    for factor in FACTORS.get(dtype, FEW_FACTORS):
        parts[factor * base], value = _push(loss.at(factor * base), untied)
        moves |= value != 0.0
    own = parts[base]
    strength = {beta: float((part * own).sum() / max(norm(own) ** 2, 1e-300)) for beta, part in parts.items()}
    if max(map(norm, parts.values())) <= NOTHING:
        return Coefficient("proportional" if moves else "ignored", strength)
    shares = [(part, beta / base * own) for beta, part in parts.items()]
    allowed = PROPORTIONAL.get(dtype, HALF_PRECISION)
    if all(norm(part - share) <= allowed * norm(share) for part, share in shares):
        return Coefficient("proportional", strength)
    cancels = _same_for_all(loss, place, [1.0] * place.size) and not _same_for_all(loss, place, place.untied)
    return Coefficient("cancels" if cancels else "other", strength)


def _same_for_all(loss: Any, place: Bench, rewards: list[float]) -> bool:
    rollout = place.rollout(place.different, rewards)
    pushes = [_push(loss.at(beta), rollout)[0] for beta in OVER]
    size = max(map(norm, pushes))
    return size > 0 and all(norm(push - pushes[-1]) <= ALIKE * size for push in pushes)


def _push(loss: Loss, rollout: Rollout) -> tuple[np.ndarray, float]:
    """What β adds to the gradient, and to the value of the loss: β times the KL part."""
    found = called(loss, rollout)
    beta = loss.beta(rollout)  # type: ignore[attr-defined]
    return beta * as_array(found, rollout), beta * float(found.outcome.objective.detach())
