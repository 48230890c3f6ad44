"""Bandits in which the reference, or the policy, is far away: is the gradient there still the declared one?

The worlds that are graded are mild. A loss may follow the declared gradient in all of them and another one where the
policy has left the reference, as Huber's does beyond its bound. It is compared with the truth there, so that what is
bounded by declaration, as total variation, is right. A log-ratio of more than 30 is left to overflow and dead zones:
what limits it beyond that guards an exponential.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.grading.declared import relative_bias, target
from kltest.grading.findings import Findings
from kltest.grading.identify import tolerance
from kltest.policies import table

WORLD = "bandit"
# What is added to the logits of the first actions. An action that the policy all but never takes counts for nothing in
# expectation: e⁻¹⁵ is far above the tolerance and all of the way to log-ratios below it.
REFERENCE = (-30.0, -6.0)
POLICY = (-15.0, -4.0)


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


def other_gradient(findings: Findings) -> Distant | None:
    """The world in which a loss that is right in a mild bandit is furthest off, None where it is right in all."""
    if findings.evaluator.dtype not in ("float64", "float32"):
        return None
    try:
        rows = findings.evaluator.rows(WORLD, "current")
    except KltestError:
        return None
    if not rows or any(row.agrees is not True or row.method != "exact" for row in rows):
        return None
    found = []
    for row in rows:
        for instance in _far(findings.evaluator.world(row).instances[0]):
            with suppress(KltestError):  # what overflows or cannot be called there is told by others
                moments = findings.evaluator.expected(row, instance)
                bias = relative_bias(moments.gradient, target(findings.expect, instance), instance)
                if bias > tolerance(moments.dtype):
                    ratios = np.sort(instance.policy[0] - instance.reference[0])
                    found.append(Distant(bias, tuple(map(float, ratios))))
    return max(found, key=lambda one: one.bias, default=None)


def _far(instance: Instance) -> list[Instance]:
    def moved(logits: np.ndarray, shift: tuple[float, ...]) -> np.ndarray:
        count = min(len(shift), logits.shape[1] - 1)
        return table(logits + np.pad(shift[:count], (0, logits.shape[1] - count)))

    away = replace(instance, reference=moved(instance.reference, REFERENCE))
    left = replace(instance, policy=moved(instance.policy, POLICY))
    # The sampler is not looked at; that it is near keeps what takes its log-probs as it is in mild worlds.
    return [away, replace(left, sampler=left.policy)]
