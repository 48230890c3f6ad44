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

import numpy as np

from kltest.checks.check import shared, signed
from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.case import relative_bias, size, target
from kltest.identify.findings import Findings
from kltest.moments.tolerances import TOLERANCES

Shifts = tuple[tuple[float, ...], tuple[float, ...]]
ENVIRONMENT = "bandit"
# Added to the logits of the first actions, of the reference and of the policy. The expectation weighs an action by its
# probability, and e⁻¹⁶ is as small as the tolerance.
FAR = ((-30.0, -6.0), (-15.0, -4.0))
NEARER = ((-12.0, -6.0), (-8.0, -4.0))
# Added to the logit of the policy's first action, which then has almost all of its probability.
CONFIDENT = (6.0,)
# Relative bias in the nearer bandits: a constant of 1e-8 beside a probability of e⁻¹² makes less than a thousandth.
MUCH = 0.01


def _worst(findings: Findings, shifts: Shifts, least: float) -> str:
    """Describe the far bandit with the largest bias of a loss that is right in a mild one; empty if it is right."""
    if findings.observed.dtype not in ("float64", "float32"):
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
                moments = findings.measure.expected(row, instance)
                findings.see(instance, rows=row.batch)
                wanted = target(findings.expect, instance, "current")
                bias = relative_bias(moments.gradient, wanted, size(instance))
                if bias > max(least, TOLERANCES[moments.dtype].gradient):
                    found.append((bias, _words(bias, instance)))
    return max(found)[1]


def _words(bias: float, instance: Instance) -> str:
    ratios = ", ".join(signed(ratio, 3) for ratio in np.sort(instance.policy[0] - instance.reference[0]))
    likeliest = np.exp(instance.policy[0].max())
    return (
        f"In a bandit with the log-ratios {ratios}, the likeliest action of probability {likeliest:.3g}, the expected "
        f"gradient is off by {bias:.2g} of the declared one; it is right in milder ones."
    )


def _moved(instance: Instance, shifts: Shifts) -> list[Instance]:
    """The instance with its reference moved, with its policy (and sampler) moved, and with a confident policy."""

    def moved(logits: np.ndarray, shift: tuple[float, ...]) -> np.ndarray:
        count = min(len(shift), logits.shape[1] - 1)
        return table(logits + np.pad(shift[:count], (0, logits.shape[1] - count)))

    reference, policy = shifts
    left = [moved(instance.policy, shift) for shift in (policy, CONFIDENT)]
    others = [replace(instance, policy=one, sampler=one) for one in left]
    return [replace(instance, reference=moved(instance.reference, reference)), *others]


differs = shared(partial(_worst, shifts=FAR, least=0.0))
# In bandits that are less far, if the bias is above a hundredth.
differs_much = shared(partial(_worst, shifts=NEARER, least=MUCH))
