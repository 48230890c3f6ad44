"""KL305: the penalty in the reward was computed with the sampler's log-probs."""

from kltest.checks.off_policy.ratios import follows, penalty_is_stale
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a gradient less that of the KL to the sampler, by name or by what is left at the reference."""
    named = follows(row, findings).items()
    if any(name.startswith("to_sampler_kl") and coefficient < 0 for name, coefficient in named):
        return True
    if row.sampler != "stale" or row.identified is not None:
        return False
    return penalty_is_stale(findings, row.environment)


moot = Findings.why_not_stale


def from_stale_logprobs(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True).exp()
    return ratio * (old_logp - ref_logp)
