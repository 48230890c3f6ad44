"""KL203: each sequence is divided by its own length."""

from __future__ import annotations

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return not findings.observed.coupled_by_length and divided_by_length(row, findings)


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
    return "zero" not in fixed.identified and abs(size * (fixed.length or 1) - unit) < 1e-3 * unit


def moot(findings: Findings) -> str | None:
    return "only environments of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def per_token(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2 / mask.sum(-1)
