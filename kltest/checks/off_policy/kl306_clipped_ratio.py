"""KL306: the importance ratio is right until its clip takes effect."""

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    if row.sampler != "stale" or row.agrees is not False:
        return False
    return findings.measure.probes.right_without_clip(row.environment)


moot = Findings.why_not_stale


def clipped(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1).exp().clamp(0.8, 1.2)
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return ratio.detach() * log_ratio.square() / 2
