"""KL306: the importance ratio is right until its clip takes effect, in the graded environments or farther out.

A loss may read the log-probs of three policies that drew or scored the rollouts: those of the engine, those before the
update, and proximal ones. They are equal unless the sampler is an engine, so that a bound on their distance never acts.
Hence those of a policy between sampler and policy are moved: ratios to it and from it put back what the other takes.
"""

import numpy as np
import torch

from kltest.checks.batches import ANOTHER, apart, gradient_of, limit, lost_tokens, usual_batch
from kltest.checks.check import Found
from kltest.checks.off_policy.ratios import right_when_nearer, unbounded
from kltest.checks.stress import examine_far_sampler
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row

# Fields from the sampler on, and by how much those of a token are moved, up and down.
BETWEEN = ("rollout_logp", "old_logp", "prox_logp")
MOVED = (0.1, 0.5, 2.0)


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a row from a stale sampler that is right, or has a name, once nothing is clipped."""
    if row.sampler != "stale" or row.agrees is not False:
        return False
    if right_when_nearer(findings, row.environment):
        return True
    return row.identified is None and unbounded(findings, row.environment).acts


moot = Findings.why_not_stale


def examine(findings: Findings) -> Found | None:
    """Report a bound that samplers reach which are farther away, or one on the distance of two fields of samplers."""
    return examine_far_sampler(findings) or _between(findings)


def _between(findings: Findings) -> Found | None:
    read = [name for name in BETWEEN if name in findings.observed.uses]
    if len(read) < 2 or findings.loss.instead is not None:
        return None
    base, loss = usual_batch(findings), findings.measure.experiment().loss
    usual = gradient_of(loss, base)

    def moved(name: str, by: float) -> np.ndarray:
        signs = torch.where(torch.arange(base.peek("mask").shape[1]) % 2 == 0, 1.0, -1.0)
        fields = {each: base.peek(each) + by * signs * (each == name) for each in BETWEEN}
        return gradient_of(loss, base.replace(**fields))

    def differs(gradient: np.ndarray) -> bool:
        return apart(gradient, usual) > limit(findings)

    for by in MOVED:
        for name in read[1:]:
            try:
                found = moved(name, by)
                # What is logged, or left alone, is no weight.
                weighs = differs(found) and differs(moved(read[0], by))
            except KltestError:  # it refuses what is so far apart
                continue
            if weighs:
                what = lost_tokens(usual, found) or ANOTHER
                return Found(
                    f"Where {name} and {read[0]}, which are equal in all else that is tried, are {by} apart at each "
                    f"token, {what}: what weighs rollouts by the one does not put back what the other takes "
                    "(--sampler engine grades them apart).",
                    level="warning",
                )
    return None


def clipped(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1).exp().clamp(0.8, 1.2)
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return ratio.detach() * log_ratio.square() / 2
