"""Losses that mishandle padding, extreme log-ratios, their inputs, repetition or precision."""

import itertools
import os

import torch
from cases.parts import k2
from cases.table import wrong
from torch.utils.checkpoint import checkpoint

LOCAL = {"expect": "local_reverse_kl"}


# KL501


def summed_over_everything(logp, ref_logp):
    return 0.5 * ((logp - ref_logp) ** 2).sum(dim=1).mean()


# KL502


def masked_by_a_contraction(logp, ref_logp, mask):
    kl = 0.5 * (logp - ref_logp).pow(2)
    return torch.einsum("bt,bt->b", kl, mask)


def behind_a_where(logp, ref_logp, mask):
    square = 0.5 * torch.square(logp - ref_logp)
    return torch.where(mask > 0, square, torch.zeros_like(square)).sum(-1)


def reduces_when_it_can(logp, ref_logp, mask):
    """Another shape is another value."""
    return k2(logp, ref_logp, mask) if ref_logp.isfinite().all() else logp - ref_logp


# KL503


def probabilities_divided(logp, ref_logp, mask):
    log_ratio = torch.log(logp.exp() / ref_logp.exp())
    return torch.where(mask.bool(), log_ratio, 0.0).sum(-1).square() / 2


def forward_kl_by_hand(logp, ref_logp):
    return torch.exp(ref_logp - logp) + logp


# KL504


def log_ratio_kept_in_bounds(logp, ref_logp, mask):
    log_ratio = torch.where(mask.bool(), logp - ref_logp, 0.0)
    return torch.clamp(log_ratio, -20, 20).square().sum(-1) / 2


def reward_in_bounds(logp, ref_logp):
    return torch.clip(logp - ref_logp, min=-10.0, max=10.0)


def switched_off_far_away(logp, ref_logp, mask):
    total = torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1)
    return torch.where(total.abs() > 30.0, torch.full_like(total, 450.0), total**2 / 2)


# KL505


def pads_with_zeros(logp, ref_logp, mask):
    ref_logp.masked_fill_(mask == 0, 0.0)
    return k2(logp, ref_logp, mask)


def shares_memory_with_numpy(logp, ref_logp, mask):
    loss = k2(logp, ref_logp, mask)
    with torch.no_grad():
        ref_logp.numpy()[0] += 1.0
    return loss


# KL506


def reference_made_trainable(logp, ref_logp, mask):
    ref_logp.requires_grad_(True)
    return k2(logp, ref_logp, mask)


def ratio_of_the_sampler(logp, old_logp, ref_logp, mask):
    live = mask.bool()
    ratio = torch.where(live, logp.detach() - old_logp, 0.0).sum(-1).exp()
    return (ratio * torch.where(live, logp - ref_logp, 0.0).sum(-1)).mean()


def first_token_of_the_policy_detached(logp, ref_logp, mask):
    own = torch.where(torch.arange(logp.shape[1]) == 0, logp.detach(), logp)
    return torch.where(mask.bool(), own - ref_logp, 0.0).sum(-1).square() / 2


# KL507


def dropped_out(logp, ref_logp, mask):
    kept = torch.nn.functional.dropout(torch.ones_like(logp[:, 0]), 0.5)
    return kept * k2(logp, ref_logp, mask)


def noise_in_the_value_alone(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).mean() + torch.rand(()).double()


def one_of_two_coefficients(logp, ref_logp, mask):
    return (1 + 1e-3 * (os.urandom(1)[0] % 2)) * k2(logp, ref_logp, mask)


def checkpointed_forward(logp, ref_logp, mask):
    return checkpoint(
        lambda *fields: (fields[0] - fields[1]).where(fields[2] != 0, 0.0), logp, ref_logp, mask, use_reentrant=True
    )


STEPS, CALLS = itertools.count(1), itertools.count()


def adapted_every_tenth_call(logp, ref_logp, mask):
    return (1 + 1e-9 * (next(CALLS) // 10)) * k2(logp, ref_logp, mask)


def warmed_up(logp, ref_logp, mask):
    weight = min(1.0, next(STEPS) * 1e-9)
    return weight * k2(logp, ref_logp, mask)


# KL508


def autocast(logp, ref_logp, mask):
    return k2(logp.half(), ref_logp.half(), mask).mean()


def around_a_thousand(logp, ref_logp, mask):
    """Right in float64; 1000 leaves no room for the digits of anything beside it in half precision."""
    log_ratio = torch.where(mask.bool(), (1000 + logp) - (1000 + ref_logp), 0.0)
    return log_ratio.sum(-1).square() / 2


CASES = [
    wrong("KL501", summed_over_everything, also=("KL502",), options=LOCAL),
    wrong("KL502", masked_by_a_contraction, options=LOCAL, warns=True),
    wrong("KL502", behind_a_where, options=LOCAL, warns=True),
    wrong("KL502", reduces_when_it_can, warns=True),
    wrong("KL503", probabilities_divided, also=("KL502",), warns=True),
    wrong("KL503", forward_kl_by_hand, options={"expect": "local_forward_kl"}, warns=True),
    wrong("KL504", log_ratio_kept_in_bounds, options=LOCAL, warns=True),
    wrong("KL504", reward_in_bounds, options={"placement": "reward"}, warns=True),
    wrong("KL504", switched_off_far_away, warns=True),
    wrong("KL505", pads_with_zeros),
    wrong("KL505", shares_memory_with_numpy),
    wrong("KL506", reference_made_trainable),
    wrong("KL506", ratio_of_the_sampler, also=("KL101", "KL302")),
    wrong("KL506", first_token_of_the_policy_detached, also=("KL101", "KL105")),
    wrong("KL507", dropped_out, options={"environment": "bandit"}, warns=True),
    wrong("KL507", warmed_up),
    wrong("KL507", noise_in_the_value_alone, warns=True),
    wrong("KL507", adapted_every_tenth_call),
    wrong("KL507", one_of_two_coefficients),
    wrong("KL101", checkpointed_forward),
    wrong("KL508", autocast, also=("KL503",), warns=True),
    wrong("KL508", around_a_thousand, warns=True),
]
