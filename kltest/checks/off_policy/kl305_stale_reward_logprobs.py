"""KL305: the penalty in the reward was computed with the sampler's log-probs."""

from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> bool:
    return row.identified is not None and row.identified.get("to_sampler_kl", 0.0) < 0


moot = Findings.why_not_stale


def from_stale_logprobs(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).where(mask != 0, 0.0).sum(-1, keepdim=True).exp()
    return ratio * (old_logp - ref_logp)
