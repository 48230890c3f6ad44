"""KL902: the gradient of the reward is scaled by group size, length or success rate."""

from kltest.checks.policy.objectives import closed_form, multiples, told
from kltest.identify.findings import Findings, Row


def explains(row: Row, findings: Findings) -> str | None:
    """Describe a row that follows ∇E[R] in every instance, by multiples that are not those of all other rows."""
    if set(row.expected) != {"expected_reward"}:
        return None
    rates = multiples(row, findings)
    if rates is None or min(share for _, share in rates) <= 0:
        return None
    form = closed_form(row, rates)
    return f"c·∇E[R] with c = {', '.join(told(rates))}{form and f': {form}'}"


def over_the_deviation(logp, reward, mask):
    centred = reward - reward.mean()
    advantage = centred / reward.std().clamp_min(1e-12)
    return -(advantage * logp.where(mask != 0, 0.0).sum(-1)).mean()


def leave_one_out(logp, reward, mask):
    advantage = reward - (reward.sum() - reward) / (len(reward) - 1)
    return -(advantage * logp.where(mask != 0, 0.0).sum(-1)).mean()
