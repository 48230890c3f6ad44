"""Bandits in which policy and reference are far apart: is the gradient still the declared one there?

The graded environments are mild. A loss may follow the declared gradient in all of them and another one once the policy
has left the reference, as Huber's loss does beyond its bound. It is compared with the truth there, so that a declared
gradient that is bounded itself, as total variation's, is right.

How far apart depends on the question. A clamp is exact and visible at any distance. A number that differs a little
where a probability is a millionth may be the small constant that guards a logarithm, and is no other gradient.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from kltest.checks.beyond import bias
from kltest.checks.check import shared, signed
from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.moments.tolerances import TOLERANCES

Shifts = tuple[tuple[float, ...], tuple[float, ...]]
ENVIRONMENT = "bandit"
# Added to the logits of the first actions, of the reference and of the policy. The expectation weighs an action by its
# probability, and e⁻¹⁶ is as small as the tolerance.
FAR = ((-30.0, -6.0), (-15.0, -4.0))
NEARER = ((-12.0, -6.0), (-8.0, -4.0))


def _worst(findings: Findings, shifts: Shifts, tolerance: Literal["gradient", "far"]) -> str:
    """Describe the far bandit with the largest bias of a loss that is right in a mild one; empty if it is right."""
    allowed = TOLERANCES[findings.observed.dtype]
    if allowed.far is None:
        return ""
    try:
        rows = findings.measure.rows(ENVIRONMENT, "current")
    except KltestError:
        return ""
    if not rows or any(row.agrees is not True or row.method != "exact" for row in rows):
        return ""
    found = [(0.0, "")]
    for row in rows:
        for instance in _moved(findings.measure.case(row).instances[0], shifts):
            with suppress(KltestError):  # overflows and failing calls are reported by other checks
                off = bias(findings, row, instance)
                if off > getattr(allowed, tolerance):
                    found.append((off, _words(off, instance)))
    return max(found)[1]


def _words(off: float, instance: Instance) -> str:
    ratios = ", ".join(signed(ratio, 3) for ratio in np.sort(instance.policy[0] - instance.reference[0]))
    return (
        f"In a bandit with the log-ratios {ratios} the expected gradient is off by {off:.2g} of the declared one; it "
        "is right in milder ones."
    )


def _moved(instance: Instance, shifts: Shifts) -> list[Instance]:
    """The instance with its reference moved, and with its policy (and sampler) moved."""

    def moved(logits: np.ndarray, shift: tuple[float, ...]) -> np.ndarray:
        count = min(len(shift), logits.shape[1] - 1)
        return table(logits + np.pad(shift[:count], (0, logits.shape[1] - count)))

    reference, policy = shifts
    left = moved(instance.policy, policy)
    return [
        replace(instance, reference=moved(instance.reference, reference)),
        replace(instance, policy=left, sampler=left),
    ]


differs = shared(partial(_worst, shifts=FAR, tolerance="gradient"))
# In bandits that are less far, beyond what a small constant makes there.
differs_much = shared(partial(_worst, shifts=NEARER, tolerance="far"))
