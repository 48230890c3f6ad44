"""KL305: the penalty in the reward was computed with the sampler's log-probs."""

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    """Return True for a gradient that takes the KL to the sampler away from the KL to the reference."""
    named = (row.identified or {}).items()
    return any(name.startswith("to_sampler_kl") and coefficient < 0 for name, coefficient in named)


moot = Findings.why_not_stale


def from_stale_logprobs(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True).exp()
    return ratio * (old_logp - ref_logp)
