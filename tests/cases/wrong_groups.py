"""Losses that get something wrong about groups, the coefficient, or how a batch is cut."""

import torch
from cases.parts import k1, k2, score
from cases.table import wrong

# --------------------------------------------------------------------------------------- KL401: tied groups masked


def zero_variance_groups_dropped(logp, ref_logp, mask, rewards, group, beta):
    """DAPO's dynamic sampling, inside the loss."""
    loss = torch.zeros((), dtype=logp.dtype)
    groups = group.unique()
    for which in groups:
        rows = group == which
        if rows.sum() > 1 and rewards[rows].std() < 1e-6:
            continue
        kept = rewards[rows] - rewards[rows].mean()
        policy = -(kept * score(logp[rows], mask[rows])).mean()
        loss = loss + policy + beta * k2(logp[rows], ref_logp[rows], mask[rows]).mean()
    return loss / len(groups)


def masked_by_the_advantage(logp, ref_logp, mask, advantages, beta=0.04):
    term = beta * k2(logp, ref_logp, mask) - advantages * score(logp, mask)
    return (term * (advantages != 0)).mean()


def reshaped_and_masked(logp, ref_logp, mask, rewards, num_generations=4):
    spread = rewards.view(-1, num_generations).std(dim=1)
    keep = (spread > 0).repeat_interleave(num_generations)
    return torch.where(keep, k2(logp, ref_logp, mask), torch.zeros_like(rewards)).mean()


def weighted_by_the_spread(logp, ref_logp, mask, rewards):
    spread = (rewards - rewards.mean()).abs().mean()
    return (k2(logp, ref_logp, mask) * spread / (spread + 1e-8)).mean()


# ---------------------------------------------------------------------------------- KL402: self-inclusive baselines


def mean_of_the_group(logp, ref_logp, mask, group):
    cost = k1(logp, ref_logp, mask)
    same = (group.unsqueeze(0) == group.unsqueeze(1)).to(cost.dtype)
    return ((cost - same @ cost / same.sum(-1)) * score(logp, mask)).mean()


def grpo_without_the_deviation(logp, ref_logp, mask, rewards, kl_coef=0.05, num_generations=4):
    shaped = rewards - kl_coef * k1(logp, ref_logp, mask)
    grouped = shaped.view(-1, num_generations)
    advantages = (grouped - grouped.mean(dim=1, keepdim=True)).flatten()
    return -(advantages * score(logp, mask)).mean()


def added_up_with_self(logp, ref_logp, mask):
    cost = k1(logp, ref_logp, mask)
    return ((cost - cost.mean()) * score(logp, mask)).sum()


# --------------------------------------------------------------------------------- KL403: the coefficient cancels


def whitened(logp, ref_logp, mask, rewards, kl_coef=0.05):
    shaped = rewards - kl_coef * k1(logp, ref_logp, mask)
    centred = shaped - shaped.mean()
    return -(centred * torch.rsqrt(centred.square().mean() + 1e-8) * score(logp, mask)).mean()


def scaled_by_the_largest(logp, ref_logp, mask, rewards, group, beta):
    shaped = rewards - beta * k1(logp, ref_logp, mask)
    advantages = torch.zeros_like(shaped)
    for which in group.unique():
        rows = group == which
        centred = shaped[rows] - shaped[rows].mean()
        advantages[rows] = centred / centred.abs().max().clamp(min=1e-6)
    return -(advantages * score(logp, mask))


# ------------------------------------------------------------------------------------------ KL404: evaluation masked


def nothing_for_one(logp, ref_logp, mask):
    if len(logp) < 2:
        return logp.sum() * 0
    return k2(logp, ref_logp, mask).mean()


def skips_groups_of_one(logp, ref_logp, mask, group):
    count = (group[:, None] == group).sum(-1)
    return torch.where(count > 1, k2(logp, ref_logp, mask), 0.0)


# ------------------------------------------------------------------------------------------ KL510: coefficient ignored


def as_a_temperature(logp, ref_logp, mask, beta):
    return torch.expm1(beta * k2(logp, ref_logp, mask))


def k3_with_its_coefficient_squared(logp, ref_logp, mask, beta):
    """A wrong gradient and a wrong coefficient are both reported."""
    delta = torch.where(mask.bool(), ref_logp - logp, 0.0).clamp(-20, 20)
    return beta**2 * (delta.expm1() - delta)


def switch(logp, ref_logp, mask, kl_coeff=0.0):
    return k2(logp, ref_logp, mask) if kl_coeff else torch.zeros_like(logp[:, 0])


# ------------------------------------------------------------------------- other pitfalls, in losses that read groups


def leave_one_out_over_lengths(logp, ref_logp, mask, group_ids):
    """A baseline that is right, and each sequence divided by its length."""
    cost = k1(logp, ref_logp, mask)
    same = (group_ids[:, None] == group_ids).to(cost.dtype)
    others = (same @ cost - cost) / (same.sum(-1) - 1).clamp(min=1)
    return (cost - others) * score(logp, mask) / mask.sum(-1)


def leave_one_out_upside_down(logp, ref_logp, mask, rewards, kl_coef):
    shaped = rewards + kl_coef * k1(logp, ref_logp, mask)
    return -((shaped - (shaped.sum() - shaped) / (len(shaped) - 1)) * score(logp, mask)).mean()


# ------------------------------------------------------------------------------------------- KL206: split-dependent


def over_the_longest(logp, ref_logp, mask):
    return (k2(logp, ref_logp, mask) / mask.sum(-1).max()).mean()


def dapo(logp, ref_logp, mask, advantages, beta):
    """Token-level loss: one mean over all tokens of the batch."""
    live = mask.bool()
    kl = torch.where(live, logp - ref_logp, 0.0).square() / 2
    term = beta * kl - advantages.unsqueeze(-1) * torch.where(live, logp, 0.0)
    return term.sum() / live.sum()


def scaled_over_the_batch(logp, ref_logp, mask, rewards, group, beta):
    """Leave-one-out in each group, whitened over all of them."""
    same = (group[:, None] == group).to(logp.dtype)
    cost = beta * k1(logp, ref_logp, mask)
    others = (same @ cost - cost) / (same.sum(-1) - 1).clamp(min=1)
    advantage = (cost - others) / (1 + rewards.mean())
    return (advantage * score(logp, mask)).mean()


CASES = [
    wrong("KL401", zero_variance_groups_dropped, slow=True),
    wrong("KL401", masked_by_the_advantage, also=("KL404",)),
    wrong("KL401", reshaped_and_masked),
    wrong("KL401", weighted_by_the_spread, also=("KL404",), slow=True),
    wrong("KL401", "tied-groups-masked", also=("KL404",)),
    wrong("KL402", mean_of_the_group),
    wrong("KL402", grpo_without_the_deviation, slow=True),
    wrong(
        "KL402",
        added_up_with_self,
        also=("KL206",),
        options={"batch_size": 3, "environment": "bandit,ragged"},
        slow=True,
    ),
    wrong("KL402", "group-mean"),
    wrong("KL403", whitened, slow=True),
    wrong("KL403", scaled_by_the_largest),
    wrong("KL403", "group-std"),
    wrong("KL404", nothing_for_one),
    wrong("KL404", skips_groups_of_one),
    wrong("KL510", as_a_temperature, also=("KL503",)),
    wrong("KL510", switch),
    wrong("KL510", k3_with_its_coefficient_squared, also=("KL102", "KL504"), options={"beta": 0.5}),
    wrong("KL203", leave_one_out_over_lengths),
    wrong("KL103", leave_one_out_upside_down, slow=True),
    wrong("KL206", over_the_longest, also=("KL204",)),
    wrong("KL206", dapo, also=("KL201", "KL204")),
    wrong("KL206", scaled_over_the_batch, also=("KL105",), slow=True),
]
