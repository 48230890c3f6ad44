"""Lengths of rollouts: environments of a single token, and gradients that are divided by the length."""

from kltest.checks.sequences.other_rollouts import Influence, influence
from kltest.identify.findings import Findings, Row
from kltest.moments.tolerances import Tolerances


def only_one_token(findings: Findings) -> str | None:
    """Return a reason to skip checks of sequences if no graded environment has any, else None."""
    return "only environments of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def divided_by_lengths_of_others(findings: Findings) -> bool:
    """Return True if rows are coupled by their lengths alone: in no other environment, or in no other way."""
    if findings.observed.coupled_by_length or not findings.observed.coupled:
        return findings.observed.coupled
    return influence(findings) == Influence(lengths=True, log_ratios=False)


def divided_by_length(row: Row, findings: Findings) -> bool:
    """Return True if the coefficients at length T are 1/T of those at length one, and varying lengths leave no name."""
    if row.length == 1:
        return False
    fixed, varying = (
        findings.measure.alone(environment, row.sampler, row.batch) for environment in ("sequence", "ragged")
    )
    if row.length is not None:
        fixed = row
    if varying is None or varying.identified is not None or fixed is None or fixed.identified is None:
        return False
    single = findings.measure.alone("bandit", row.sampler, row.batch)
    unit = sum(map(abs, single.identified.values())) if single and single.identified else 1.0
    size = sum(map(abs, fixed.identified.values()))
    return "zero" not in fixed.identified and abs(size * (fixed.length or 1) - unit) < Tolerances.factor * unit
