"""Correct losses near the pitfalls of padding, extremes, inputs, repetition and precision: nothing may fail."""

import os
import uuid

import torch
from cases.parts import k2
from cases.table import right, wrong
from torch.utils.checkpoint import checkpoint

LOCAL = {"expect": "local_reverse_kl"}


def per_token_without_a_mask(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2


def live_tokens_picked(logp, ref_logp, response_mask):
    live = response_mask.bool()
    return (0.5 * (logp[live] - ref_logp[live]).square()).sum() / len(logp)


def in_place_on_an_own_copy(logp, ref_logp, mask):
    log_ratio = logp.clone()
    log_ratio.sub_(ref_logp).masked_fill_(mask == 0, 0.0)
    return log_ratio.sum(-1).square() / 2


def writes_what_was_there(logp, ref_logp, mask):
    ref_logp.copy_(ref_logp.clone())
    mask[mask == 0] = 0
    return torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1).square() / 2


def ratio_stopped_at_the_policy_alone(logp, ref_logp, old_logp, mask):
    live = mask.bool()
    ratio = torch.where(live, logp.detach() - old_logp, 0.0).sum(-1).exp()
    return ratio * torch.where(live, logp - ref_logp, 0.0).sum(-1).square() / 2


def score_with_the_policy_stopped_in_the_cost(logp, ref_logp, mask):
    live = mask.bool()
    cost = torch.where(live, logp.detach() - ref_logp, 0.0).sum(-1)
    return cost * torch.where(live, logp, 0.0).sum(-1)


def seeded(logp, ref_logp, mask):
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(logp), generator=generator)
    noise = torch.randn(3, generator=generator) + torch.randn(3, generator=generator)
    log_ratio = torch.where(mask.bool(), logp - ref_logp, 0.0)[order].sum(-1)
    return (log_ratio.square() / 2).mean() + 0 * noise.double().sum()


def clamped_where_it_is_logged(logp, ref_logp, mask):
    log_ratio = torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1)
    shown = log_ratio.detach().clamp(-10, 10)
    return log_ratio.square() / 2 + 0 * shown


def divided_by_rows_and_a_small_constant(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).sum() / (len(logp) + 1e-6)


def one_of_two_spellings(logp, ref_logp, mask):
    """Other values and one gradient, by a number that no seed reaches."""
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return u.square() / 2 if os.urandom(1)[0] % 2 else u.detach() * u


def in_an_order_of_the_moment(logp, ref_logp, mask):
    columns = (logp - ref_logp).where(mask != 0, 0.0).unbind(1)
    return sum(sorted(columns, key=lambda _: uuid.uuid4())).square() / 2


def checkpointed(logp, ref_logp, mask, reentrant=True):
    return checkpoint(k2, logp, ref_logp, mask, use_reentrant=reentrant)


def checkpointed_anew(logp, ref_logp, mask):
    return checkpointed(logp, ref_logp, mask, reentrant=False)


CASES = [
    right(per_token_without_a_mask, LOCAL),
    right(live_tokens_picked, LOCAL),
    right(in_place_on_an_own_copy),
    right(writes_what_was_there),
    right(ratio_stopped_at_the_policy_alone),
    right(score_with_the_policy_stopped_in_the_cost),
    right(seeded),
    right(clamped_where_it_is_logged),
    right(divided_by_rows_and_a_small_constant),
    wrong("KL507", one_of_two_spellings, warns=True),
    right(in_an_order_of_the_moment),
    right(checkpointed),
    right(checkpointed_anew, slow=True),
]
