"""KL304: one ratio of the whole sequence multiplies every token's term."""

from __future__ import annotations

from kltest.checks.losses import prefix_ratio
from kltest.counterexample.demonstration import Demonstration, of_gradients
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if row.sampler != "stale" or row.identified is not None or row.length == 1:
        return False
    return findings.measure.probes.only_through_the_sum(row.environment)


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


def one_mean_ratio(logp, ref_logp, old_logp, mask):
    log_ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True)
    ratio = (log_ratio / mask.sum(-1, keepdim=True)).exp().detach()
    return ratio * (logp - ref_logp).where(mask != 0, 0.0).square() / 2


ENVIRONMENT = SmallEnvironment(
    policy=[(0.5, 0.5), (0.8, 0.2), (0.8, 0.2)],
    reference=[(0.5, 0.5)] * 3,
    sampler=[(0.8, 0.2), (0.8, 0.2), (0.8, 0.2)],
    length=2,
)


def demonstrate() -> Demonstration:
    return of_gradients(
        ENVIRONMENT, {"as written": one_mean_ratio, "fixed": prefix_ratio}, declared="local_reverse_kl", sampler="stale"
    )
