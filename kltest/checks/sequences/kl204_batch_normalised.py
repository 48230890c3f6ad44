"""KL204: one mean over the tokens of the whole batch."""

from __future__ import annotations

from kltest.checks.losses import squared_sum
from kltest.checks.sequences.kl203_length_normalised import divided_by_length
from kltest.counterexample.demonstration import Demonstration, of_gradients
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if not findings.observed.coupled_by_length:
        return False
    if row.batch > 1:
        return row.identified is None
    return divided_by_length(row, findings)


def moot(findings: Findings) -> str | None:
    return "only environments of length 1 were graded" if set(findings.environments) <= {"bandit"} else None


def mean_over_tokens(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (log_ratio.square() / 2).sum() / mask.sum()


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2), (0.5, 0.5)], reference=[(0.5, 0.5)] * 2, length=2, ends=True)


def demonstrate() -> Demonstration:
    return of_gradients(ENVIRONMENT, {"as written": mean_over_tokens, "fixed": squared_sum}, batch=2)
