"""Evaluation of one case: from the moments of a loss's gradient to a row. Pure functions; no loss is called here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kltest.identify.case import Case, relative_bias, size, target, worst_cosine
from kltest.identify.findings import Combination, Row
from kltest.identify.identification import identify
from kltest.moments import Moments, Sampled
from kltest.moments.tolerances import LOWEST_FIRST, TOLERANCES

# A bias beyond this is more than rounding in float64, even if it is within the tolerance.
ALMOST = 1e-9
STALE_ONLY = "means something only when the sampler is not the policy"


def lowest_precision(found: Sequence[Moments | Sampled], *others: str) -> str:
    """The lowest precision in which any of the moments was computed."""
    return min([*others, *(moments.dtype for moments in found)], key=LOWEST_FIRST.index)


def evaluate(
    case: Case,
    declared: Combination,
    found: Sequence[Moments],
    *,
    off_policy_only: bool = False,
    note: str = "",
) -> Row:
    """The row of a case from exact moments, one an instance.

    Args:
        case: The environment and sampler under which the moments were taken.
        declared: The combination of named gradients that the loss is meant to follow.
        found: Moments of the gradient with respect to logits, in the order of `case.instances`.
        off_policy_only: The estimator means something only with a stale sampler; it is not judged under `current`.
        note: A remark for the report.
    """
    drawn = case.instances
    dtype = lowest_precision(found)
    gradients = [moments.gradient for moments in found]
    targets = [target(declared, instance) for instance in drawn]
    at_parameters = case.at_parameters(gradients), case.at_parameters(targets)
    candidates = case.candidates_at_parameters
    units = [float(np.linalg.norm(one)) for one in candidates["reverse_kl"]]
    # The root mean square of a rollout's gradient is known at the logits. Times ‖∇KL‖ at the parameters over ‖∇KL‖ at
    # the logits it has the scale of the gradients that are compared.
    factors = [unit / size(instance) for unit, instance in zip(units, drawn, strict=True)]
    magnitudes = [f * float(np.sqrt(moments.second_moment)) for f, moments in zip(factors, found, strict=True)]
    identification = identify(
        at_parameters[0], candidates, magnitudes=magnitudes, units=units, dtype=dtype, freedom=case.freedom
    )
    bias = max(relative_bias(*triple) for triple in zip(*at_parameters, units, strict=True))
    agrees: bool | None = bias <= TOLERANCES[dtype].gradient
    if off_policy_only and case.sampler == "current":
        agrees, note = None, STALE_ONLY
    elif agrees and dtype == "float64" and bias > ALMOST:
        note = f"to {bias:.1g} of it only, as with a small constant in a denominator"
    return Row(
        case.environment,
        case.sampler,
        identification.combination,
        expected=case.spelt(declared),
        agrees=agrees,
        relative_bias=bias,
        cosine=worst_cosine(*at_parameters, identification),
        residual=identification.residual,
        relative_variance=max(m.variance / size(i) ** 2 for m, i in zip(found, drawn, strict=True)),
        variances=tuple(moments.variance for moments in found),
        method="exact",
        instances=len(drawn),
        rollouts=found[0].rollouts,
        length=case.length,
        batch=found[0].batch,
        note=note,
    )


def not_judged(case: Case, declared: Combination, batch: int, note: str) -> Row:
    """The row of a case that can neither be enumerated nor sampled; `note` says why."""
    return Row(
        case.environment,
        case.sampler,
        None,
        expected=case.spelt(declared),
        agrees=None,
        relative_bias=float("nan"),
        cosine=None,
        residual=float("nan"),
        relative_variance=float("nan"),
        method="exact",
        instances=len(case.instances),
        rollouts=len(case.instances[0].paths),
        length=case.length,
        batch=batch,
        note=note,
    )
