"""Correct losses that couple the rollouts of a group, read rewards, or take a coefficient."""

import torch
from cases.parts import k1, k2, score
from cases.table import right


def leave_one_out_by_the_batch(logp, ref_logp, mask, rewards, kl_coef=0.05):
    shaped = rewards - kl_coef * k1(logp, ref_logp, mask)
    baseline = (shaped.sum() - shaped) / (len(shaped) - 1)
    return -((shaped - baseline) * score(logp, mask)).mean()


def leave_one_out_by_rows(logp, ref_logp, mask, rewards, kl_coef=0.05, rloo_k=4):
    """As TRL's RLOO trainer wrote it: a row for each of the k samples of every prompt."""
    shaped = (rewards - kl_coef * k1(logp, ref_logp, mask)).reshape(rloo_k, -1)
    baseline = (shaped.sum(0) - shaped) / (rloo_k - 1)
    return (-(shaped - baseline).flatten() * score(logp, mask)).mean()


def leave_one_out_by_a_loop(logp, ref_logp, mask, rewards, group, beta):
    total = 0.0
    numbers = group.tolist()
    shaped = rewards - beta * k1(logp, ref_logp, mask)
    for row, number in enumerate(numbers):
        others = [shaped[i] for i, other in enumerate(numbers) if other == number and i != row]
        baseline = torch.stack(others).mean() if others else 0.0
        total = total - (shaped[row] - baseline) * score(logp, mask)[row]
    return total / len(numbers)


def rescaled_group_mean(logp, ref_logp, mask, group):
    cost = k1(logp, ref_logp, mask)
    same = (group[:, None] == group).to(cost.dtype)
    n = same.sum(-1)
    return (cost - same @ cost / n) * score(logp, mask) * n / (n - 1).clamp(min=1)


def leave_one_out_added_up(logp, ref_logp, mask):
    cost = k1(logp, ref_logp, mask)
    baseline = (cost.sum() - cost) / (len(cost) - 1)
    return ((cost - baseline) * score(logp, mask)).sum()


def grpo_with_group_ids(logp, ref_logp, mask, rewards, group_ids, beta=0.04):
    """Rewards normalised by group, the KL a term of its own, the squared log-ratio of the whole sequence."""
    same = (group_ids[:, None] == group_ids).to(logp.dtype)
    mean = same @ rewards / same.sum(-1)
    variance = same @ (rewards - mean).square() / (same.sum(-1) - 1).clamp(min=1)
    advantages = (rewards - mean) / (variance.sqrt() + 1e-4)
    return beta * k2(logp, ref_logp, mask) - advantages * score(logp, mask)


def policy_part_masked_alone(logp, ref_logp, mask, rewards, group, beta):
    same = (group[:, None] == group).to(logp.dtype)
    advantages = rewards - same @ rewards / same.sum(-1)
    informative = ((rewards[:, None] != rewards) & (same > 0)).any(-1)
    policy = torch.where(informative, -advantages * score(logp, mask), 0.0)
    return (policy + beta * k2(logp, ref_logp, mask)).mean()


def count_of_the_whole_batch(logp, ref_logp, mask, max_completion_length=1):
    return k2(logp, ref_logp, mask).sum() / (len(logp) * max_completion_length)


def negative_coefficient(logp, ref_logp, mask, rewards, kl_coef):
    """A cost that is subtracted, in code that maximises."""
    return -(rewards * score(logp, mask)) - (-kl_coef) * k2(logp, ref_logp, mask)


CASES = [
    right(leave_one_out_by_the_batch, slow=True),
    right(leave_one_out_by_rows, slow=True),
    right(leave_one_out_by_a_loop, slow=True),
    right(leave_one_out_by_a_loop, {"group_size": 3}, slow=True),
    right(rescaled_group_mean),
    right(leave_one_out_added_up, slow=True),
    right(leave_one_out_added_up, {"batch_size": 3, "environment": "bandit"}, slow=True),
    right(grpo_with_group_ids),
    right(policy_part_masked_alone),
    right(count_of_the_whole_batch),
    right(negative_coefficient),
    right("leave-one-out"),
    right("leave-one-out", {"group_size": 8, "environment": "bandit,sequence,ragged,mdp"}, slow=True),
]
