"""KL301: rollouts of another policy, taken as if they were the policy's own."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum_with_ratio
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
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


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], sampler=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": without_ratio, "mended": squared_sum_with_ratio}, sampler="stale")


CHECK = Check(
    code="KL301",
    name="missing-importance-ratio",
    title="The sampler's log-probs have no influence on the gradient: there is no importance ratio",
    what=(
        "Rollouts come from a sampler that is no longer the policy, and the KL term's gradient is the same whatever "
        "the sampler's log-probs are."
    ),
    why=(
        "An expectation under the policy is estimated with samples of another one. The bias does not shrink "
        "with more samples; it grows with every inner step, with asynchronous generation and with engine "
        "mismatch."
    ),
    example=(
        "Two actions, sampler (0.5, 0.5), π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the "
        "first probability; the truth is ln 4 = 1.386294. k2 in the loss without a ratio gives 2.584479."
    ),
    fix=(
        "Weight with the ratio of policy to sampler, detached for k2 and for terms in the reward: exp((logp − "
        "old_logp).detach()) on one token; on sequences the product over the prefix (or the whole sequence)."
    ),
    sources=(
        "Tang & Munos 2025, arXiv 2506.09477",
        "DeepSeek-V3.2, arXiv 2512.02556, §3.1",
        "Zhang et al. 2025, RPG, arXiv 2505.17508",
    ),
    wrong=without_ratio,
    mended=squared_sum_with_ratio,
    demonstrate=demonstrate,
    options={"sampler": "both"},
    explains=explains,
    moot=moot,
)
