"""KL509: no gradient reaches the policy."""

from __future__ import annotations

from kltest.checks.losses import squared_sum
from kltest.counterexample.demonstration import Demonstration, of_gradients
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return findings.blocked


def moot(findings: Findings) -> str | None:
    return "a value in the reward needs no gradient" if findings.placement == "reward" else None


def detached(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).detach().where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(ENVIRONMENT, {"as written": detached, "fixed": squared_sum})
