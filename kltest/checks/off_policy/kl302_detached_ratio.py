"""KL302: the ratio is there, but its own derivative is cut."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum_with_ratio
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if row.sampler != "stale" or findings.placement != "loss":
        return False
    return findings.measure.probes.mended_by_reattaching(row.environment)


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


def ratio_detached(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1).exp().detach()
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return ratio * ((-log_ratio).exp() - 1 + log_ratio)


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], sampler=[(0.6, 0.4)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": ratio_detached, "mended": squared_sum_with_ratio}, sampler="stale")


CHECK = Check(
    code="KL302",
    name="detached-ratio",
    title="The importance ratio is detached where its derivative is needed",
    what=(
        "The loss multiplies an estimate by the importance ratio with the gradient stopped; letting the "
        "gradient through gives exactly the declared one."
    ),
    why=(
        "ρ·k3 with a differentiable ratio has weight ρ·(1 − w + w − 1 + u) = ρ·u: the ratio's derivative "
        "carries the score-function part. Without it, only the estimator's own derivative is left: the "
        "forward KL's."
    ),
    example=(
        "Two actions, sampler (0.6, 0.4), π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the "
        "first probability; the truth is ln 4 = 1.386294. k3 times the detached ratio gives 1.875; with the "
        "ratio differentiable it gives 1.386294."
    ),
    fix=(
        "Remove the detach (or the no_grad block) around exp(logp − old_logp); or keep it detached and use k2 "
        "in place of k3."
    ),
    sources=(
        "DeepSeek-V3.2, arXiv 2512.02556, §3.1",
        "Zhang et al. 2025, RPG, arXiv 2505.17508",
    ),
    wrong=ratio_detached,
    mended=squared_sum_with_ratio,
    demonstrate=demonstrate,
    options={"sampler": "both"},
    explains=explains,
    moot=moot,
)
