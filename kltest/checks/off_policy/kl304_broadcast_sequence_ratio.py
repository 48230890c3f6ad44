"""KL304: one ratio of the whole sequence multiplies every token's term."""

from kltest.checks.off_policy.ratios import broadcast, follows
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a mean ratio of all tokens by name, or a weight of many tokens in an unnamed gradient."""
    if any(name.endswith("@mean_ratio") for name in follows(row, findings)):
        return True
    if row.sampler != "stale" or row.identified is not None or row.length == 1:
        return False
    return broadcast(findings, row.environment)


moot = Findings.why_not_stale


def one_mean_ratio(logp, ref_logp, old_logp, mask):
    log_ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True)
    ratio = (log_ratio / mask.sum(-1, keepdim=True)).exp().detach()
    return ratio * (logp - ref_logp).where(mask != 0, 0.0).square() / 2
