"""KL303: each token is re-weighted, its prefix is not."""

from __future__ import annotations

from kltest.checks.losses import prefix_ratio
from kltest.counterexample.demonstration import Demonstration, of_gradients
from kltest.counterexample.environment import SmallEnvironment
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified is not None and any(name.endswith("@sampler") for name in row.identified)


def moot(findings: Findings) -> str | None:
    if any(name.endswith("@sampler") for name in findings.expect):
        return "prefixes weighted by the sampler are what was declared"
    return findings.why_not_stale()


def own_ratio_only(logp, ref_logp, old_logp):
    ratio = (logp - old_logp).exp().detach()
    return ratio * (logp - ref_logp).square() / 2


ENVIRONMENT = SmallEnvironment(
    policy=[(0.5, 0.5), (0.8, 0.2), (0.5, 0.5)],
    reference=[(0.5, 0.5)] * 3,
    sampler=[(0.8, 0.2), (0.8, 0.2), (0.5, 0.5)],
    length=2,
)


def demonstrate() -> Demonstration:
    return of_gradients(
        ENVIRONMENT, {"as written": own_ratio_only, "fixed": prefix_ratio}, declared="local_reverse_kl", sampler="stale"
    )
