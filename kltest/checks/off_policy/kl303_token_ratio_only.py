"""KL303: each token is re-weighted, its prefix is not."""

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for gradients in which the sampler draws the prefixes, and no name lacks the token's own ratio."""
    ratios = {name.partition("@")[2] for name in row.identified or ()}
    return "sampler" in ratios and "rollouts" not in ratios


def moot(findings: Findings) -> str | None:
    """Return a reason to skip the check if such prefixes were declared or samplers are current, else None."""
    if any(name.endswith("@sampler") for name in findings.expect):
        return "prefixes weighted by the sampler were declared"
    return findings.why_not_stale()


def own_ratio_only(logp, ref_logp, old_logp):
    ratio = (logp - old_logp).exp().detach()
    return ratio * (logp - ref_logp).square() / 2
