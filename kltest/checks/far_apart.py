"""Bandits in which the reference, or the policy, is far away: is the gradient there still the declared one?

The worlds that are graded are mild. A loss may follow the declared gradient in all of them and another one where the
policy has left the reference, as Huber's does beyond its bound. It is compared with the truth there, so that what is
bounded by declaration, as total variation, is right.

How far is asked for depends on what is asked. A clamp is exact and seen at any distance; a number that differs a little
where a probability is a millionth may be the small constant that guards its logarithm, and is no other gradient.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings
from kltest.identify.identification import tolerance

Shifts = tuple[tuple[float, ...], tuple[float, ...]]
WORLD = "bandit"
# What is added to the logits of the first actions, of the reference and of the policy. An action that the policy all
# but never takes counts for nothing in expectation, as little as the tolerance from e⁻¹⁶ on.
FAR = ((-30.0, -6.0), (-15.0, -4.0))
NEARER = ((-12.0, -6.0), (-8.0, -4.0))
# Of the declared gradient, in the nearer worlds: 1e-8 beside a probability of e⁻¹² makes less than a thousandth.
MUCH = 0.01


@dataclass(frozen=True)
class Distant:
    """A world where the gradient is not the declared one, by how much, and the log-ratios in it."""

    bias: float
    log_ratios: tuple[float, ...]

    @property
    def words(self) -> str:
        ratios = ", ".join(f"{ratio:.3g}".replace("-", "−") for ratio in self.log_ratios)
        return (
            f"In a bandit with the log-ratios {ratios} the expected gradient is off by {self.bias:.2g} of the declared "
            "one, which it is where policy and reference are near."
        )


def differs(findings: Findings) -> Distant | None:
    """The far world in which a loss that is right in a mild bandit is off most, None where it is right in all."""
    return _worst(findings, FAR, 0.0)


def differs_much(findings: Findings) -> Distant | None:
    """The same of worlds that are not as far, where it is off by more than a hundredth."""
    return _worst(findings, NEARER, MUCH)


def _worst(findings: Findings, shifts: Shifts, least: float) -> Distant | None:
    if findings.observed.dtype not in ("float64", "float32"):
        return None
    try:
        rows = findings.measure.rows(WORLD, "current")
    except KltestError:
        return None
    if not rows or any(row.agrees is not True or row.method != "exact" for row in rows):
        return None
    found = []
    for row in rows:
        for instance in _moved(findings.measure.case(row).instances[0], shifts):
            with suppress(KltestError):  # what overflows or cannot be called there is told by others
                moments = findings.measure.expected(row, instance)
                bias = relative_bias(moments.gradient, target(findings.expect, instance), size(instance))
                if bias > max(least, tolerance(moments.dtype)):
                    ratios = np.sort(instance.policy[0] - instance.reference[0])
                    found.append(Distant(bias, tuple(map(float, ratios))))
    return max(found, key=lambda one: one.bias, default=None)


def _moved(instance: Instance, shifts: Shifts) -> list[Instance]:
    def moved(logits: np.ndarray, shift: tuple[float, ...]) -> np.ndarray:
        count = min(len(shift), logits.shape[1] - 1)
        return table(logits + np.pad(shift[:count], (0, logits.shape[1] - count)))

    reference, policy = shifts
    left = replace(instance, policy=moved(instance.policy, policy))
    # Rollouts are the policy's own.
    return [replace(instance, reference=moved(instance.reference, reference)), replace(left, sampler=left.policy)]
