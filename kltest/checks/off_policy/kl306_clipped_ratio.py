"""KL306: the ratio is right until its clip bites."""

from __future__ import annotations

from kltest.checks.check import Check
from kltest.checks.losses import squared_sum_with_ratio
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if row.sampler != "stale" or row.agrees is not False:
        return False
    return findings.measure.probes.right_without_clip(row.environment)


def moot(findings: Findings) -> str | None:
    return findings.why_not_stale()


def clipped(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1).exp().clamp(0.8, 1.2)
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return ratio.detach() * log_ratio.square() / 2


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)], sampler=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": clipped, "mended": squared_sum_with_ratio}, sampler="stale")


CHECK = Check(
    code="KL306",
    name="clipped-ratio",
    title="The importance ratio is clipped",
    what=(
        "The gradient is the declared one while policy and sampler are within a hundredth of each other, and "
        "is not when they are further apart: something that limits the ratio bites."
    ),
    why=(
        "A clipped or truncated ratio is no importance weight: where it bites, samples are over- or "
        "under-weighted, most where the policy has moved most."
    ),
    example=(
        "Two actions, sampler (0.5, 0.5), π = (0.8, 0.2), ref = (0.5, 0.5); derivatives with respect to the "
        "first probability; the truth is ln 4 = 1.386294. k2 with the detached ratio clipped to [0.8, 1.2] "
        "gives 2.185084."
    ),
    fix=(
        "Leave the KL term's ratio unclipped (clipping belongs to the policy objective), or make the range "
        "wide enough never to bite and say so."
    ),
    sources=("Schulman et al. 2017, PPO, arXiv 1707.06347",),
    wrong=clipped,
    mended=squared_sum_with_ratio,
    demonstrate=demonstrate,
    options={"sampler": "both"},
    explains=explains,
    moot=moot,
)
