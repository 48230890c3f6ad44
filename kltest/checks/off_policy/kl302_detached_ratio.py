"""KL302: the importance ratio is there, but its derivative is cut off."""

from kltest.checks.off_policy.ratios import fixed_by_reattaching
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True if the declared gradient is followed once detached log-probs are attached again."""
    if row.sampler != "stale" or findings.placement != "loss":
        return False
    return fixed_by_reattaching(findings, row.environment)


moot = Findings.why_not_stale


def ratio_detached(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1).exp().detach()
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return ratio * ((-log_ratio).exp() - 1 + log_ratio)
