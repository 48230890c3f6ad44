"""KL306: the importance ratio is right until its clip takes effect, in the graded environments or farther out."""

from kltest.checks.off_policy.ratios import right_when_nearer, unbounded
from kltest.checks.stress import examine_far_sampler
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a row from a stale sampler that is right, or has a name, once nothing is clipped."""
    if row.sampler != "stale" or row.agrees is not False:
        return False
    if right_when_nearer(findings, row.environment):
        return True
    return row.identified is None and unbounded(findings, row.environment).acts


moot = Findings.why_not_stale

# A bound that samplers reach which are farther from the policy than the graded ones.
examine = examine_far_sampler


def clipped(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1).exp().clamp(0.8, 1.2)
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return ratio.detach() * log_ratio.square() / 2
