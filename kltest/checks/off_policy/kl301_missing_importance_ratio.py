"""KL301: rollouts of the sampler are used as if they were the policy's own."""

from __future__ import annotations

from kltest.checks.losses import squared_sum_with_ratio
from kltest.counterexample.demonstration import Demonstration, of_gradients
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if row.sampler != "stale" or (row.identified is not None and not findings.measure.right_when_current(row)):
        return False
    return not findings.measure.probes.sampler_has_influence(row.environment)


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


def without_ratio(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], sampler=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(ENVIRONMENT, {"as written": without_ratio, "fixed": squared_sum_with_ratio}, sampler="stale")
