"""Rows of cases from the moments of a loss's gradient. Pure functions; no loss is called here."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kltest.environments import Instance
from kltest.identify.case import Case, relative_bias, size, target, worst_cosine
from kltest.identify.combinations import Combination
from kltest.identify.identification import Identification, identify
from kltest.identify.rows import Row
from kltest.moments import Moments
from kltest.moments.tolerances import LOWEST_FIRST, TOLERANCES
from kltest.samples.sampled import Sampled
from kltest.truth import gradient

# A bias beyond this is more than rounding in float64, even if it is within the tolerance.
ALMOST = 1e-9


def lowest_precision(found: Sequence[Moments | Sampled], *others: str) -> str:
    """Return the lowest precision in which any of the moments was computed."""
    return min([*others, *(moments.dtype for moments in found)], key=LOWEST_FIRST.index)


def evaluate(case: Case, declared: Combination, found: Sequence[Moments], note: str = "") -> Row:
    """Return the row of a case from exact moments.

    Args:
        case: The environment and sampler under which the moments were taken.
        declared: The combination of named gradients that the loss is meant to follow.
        found: Moments of the gradient with respect to logits, one an instance, in the order of `case.instances`.
        note: A remark for the report.
    """
    drawn = case.instances
    dtype = lowest_precision(found)
    gradients = case.at_parameters([moments.gradient for moments in found])
    targets = case.at_parameters([target(declared, instance, case.sampler) for instance in drawn])
    candidates = case.candidates_at_parameters
    units = [float(np.linalg.norm(one)) for one in candidates["reverse_kl"]]
    # The root mean square of a rollout's gradient is known at the logits. Times ‖∇KL‖ at the parameters over ‖∇KL‖ at
    # the logits it has the scale of the gradients that are compared.
    factors = [unit / size(instance) for unit, instance in zip(units, drawn, strict=True)]
    magnitudes = [f * float(np.sqrt(moments.second_moment)) for f, moments in zip(factors, found, strict=True)]
    identification = identify(
        gradients, candidates, magnitudes=magnitudes, units=units, dtype=dtype, freedom=case.freedom, basis=case.basis
    )
    bias = max(relative_bias(*triple) for triple in zip(gradients, targets, units, strict=True))
    agrees = bias <= TOLERANCES[dtype].gradient
    if agrees and dtype == "float64" and bias > ALMOST:
        note = f"to {bias:.1g} of it only, as with a small constant in a denominator"
    return row_of(
        case,
        declared,
        found,
        identification,
        agrees=agrees,
        relative_bias=bias,
        cosine=worst_cosine(gradients, targets, identification),
        gradients=tuple(moments.gradient for moments in found),
        variances=tuple(moments.variance for moments in found),
        rollouts=found[0].rollouts,
        note=note,
    )


def name_of(case: Case, drawn: Sequence[Instance], found: Sequence[Moments]) -> Identification:
    """Return what moments on instances like those of a case follow."""
    return identify(
        [moments.gradient for moments in found],
        {name: [gradient(name, instance) for instance in drawn] for name in case.basis},
        magnitudes=[float(np.sqrt(moments.second_moment)) for moments in found],
        units=[size(instance) for instance in drawn],
        dtype=lowest_precision(found),
        freedom=case.freedom,
        basis=case.basis,
    )


def not_judged(case: Case, declared: Combination, batch: int, note: str) -> Row:
    """Return the row of a case that can neither be enumerated nor sampled; `note` says why."""
    nan = float("nan")
    rollouts, nothing = len(case.instances[0].paths), Identification(None, nan)
    return row_of(
        case, declared, (), nothing, relative_bias=nan, cosine=None, rollouts=rollouts, batch=batch, note=note
    )


def row_of(
    case: Case,
    declared: Combination,
    found: Sequence[Moments | Sampled],
    identification: Identification,
    **others: Any,
) -> Row:
    """Return a row with what all rows of a case have in common; `others` are its other fields."""
    variances = [moments.variance / size(one) ** 2 for moments, one in zip(found, case.instances, strict=bool(found))]
    return Row(
        case.environment,
        case.sampler,
        identification.combination,
        expected=case.spelt(declared),
        residual=identification.residual,
        relative_variance=max(variances, default=float("nan")),
        instances=len(case.instances),
        case=case,
        **{"method": "exact", "batch": found[0].batch if found else 1, **others},
    )
