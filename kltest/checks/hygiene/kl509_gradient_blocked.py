"""KL509: no gradient reaches the policy."""

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True if no gradient reaches the policy."""
    return findings.observed.blocked


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if the term is placed in the reward, else None."""
    return "a value in the reward needs no gradient" if findings.placement == "reward" else None


def detached(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).detach().where(mask != 0, 0.0).sum(-1)
    return log_ratio.square() / 2
