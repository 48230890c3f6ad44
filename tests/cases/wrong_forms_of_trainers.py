"""Forms that trainers have: masks with gaps, backward passes written by hand, logits as a model gives them."""

import torch
import torch.nn.functional as F
from cases.parts import k2
from cases.table import right, wrong

LOCAL = {"expect": "local_reverse_kl"}

# KL208


def last_turn_alone(logp, ref_logp, response_mask):
    """Only tokens with no masked one behind them before the end of the row."""
    live = response_mask != 0
    last = live.shape[1] - live.flip(1).long().argmax(1, keepdim=True)
    before_last = torch.arange(live.shape[1]) < last
    gaps = (~live & before_last).flip(1).cumsum(1).flip(1)
    return (logp - ref_logp).where(live & (gaps == 0), 0.0).sum(-1).square() / 2


def credit_ends_with_the_turn(logp, ref_logp, loss_mask):
    live = loss_mask != 0
    cost, running = torch.zeros_like(logp), torch.zeros(len(logp), dtype=logp.dtype)
    log_ratio = (logp - ref_logp).detach().where(live, 0.0)
    for step in reversed(range(logp.shape[1])):
        running = (running + log_ratio[:, step]).where(live[:, step], 0.0)
        cost[:, step] = running
    return (cost * logp).where(live, 0.0).sum(-1)


def credit_across_turns(logp, ref_logp, loss_mask):
    live = loss_mask != 0
    log_ratio = (logp - ref_logp).detach().where(live, 0.0)
    return (log_ratio.flip(1).cumsum(1).flip(1) * logp).where(live, 0.0).sum(-1)


def prefix_of_an_attention_mask(logp, ref_logp, attention_mask):
    live = torch.arange(logp.shape[1]) < attention_mask.sum(-1, keepdim=True)
    return (logp - ref_logp).where(live, 0.0).sum(-1).square() / 2


def up_to_a_wide_gap(logp, ref_logp, mask):
    """Tokens before the first gap of three columns or more."""
    live = mask != 0
    place = torch.arange(live.shape[1]).expand_as(live)
    last = torch.where(live, place, -1).cummax(1).values
    apart = (live[:, 1:] & (place[:, 1:] - last[:, :-1] > 3)).cumsum(1) > 0
    apart = torch.cat([torch.zeros_like(live[:, :1]), apart], 1)
    return (logp - ref_logp).where(live & ~apart, 0.0).sum(-1).square() / 2


def if_the_first_column_is_live(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask * (mask[:, :1] != 0))


# KL511


class HalfSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_ratio, scaled):
        ctx.save_for_backward(log_ratio)
        ctx.scaled = scaled
        return log_ratio.sum(-1).square() / 2

    @staticmethod
    def backward(ctx, upstream):
        (log_ratio,) = ctx.saved_tensors
        gradient = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
        return (gradient * upstream[:, None] if ctx.scaled else gradient), None


def kernel_without_upstream(logp, ref_logp, mask):
    return HalfSquare.apply((logp - ref_logp).where(mask != 0, 0.0), False)


def kernel_with_upstream(logp, ref_logp, mask):
    return HalfSquare.apply((logp - ref_logp).where(mask != 0, 0.0), True)


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, upstream):
        return torch.ones_like(upstream)


def sum_that_starts_anew(logp, ref_logp, mask):
    return Passed.apply(k2(logp, ref_logp, mask))


# KL512


def kl_div_of_logits(logits, ref_logits, mask):
    return (F.kl_div(ref_logits, logits, log_target=True, reduction="none").sum(-1) * mask).sum(-1)


def exponentials_of_logits(logits, ref_logits, mask):
    live = mask != 0
    return (logits.exp() * (logits - ref_logits)).sum(-1).where(live, 0.0).sum(-1)


def of_log_probs(logits, ref_logits, mask):
    live = mask != 0
    own, other = (part.where(live[..., None], 0.0).log_softmax(-1) for part in (logits, ref_logits))
    return F.kl_div(other, own, log_target=True, reduction="none").sum(-1).where(live, 0.0).sum(-1)


CASES = [
    wrong("KL208", last_turn_alone),
    wrong("KL208", credit_ends_with_the_turn),
    wrong("KL208", prefix_of_an_attention_mask, warns=True),
    right(credit_across_turns),
    wrong("KL208", up_to_a_wide_gap),
    wrong("KL208", if_the_first_column_is_live),
    wrong("KL511", kernel_without_upstream),
    wrong("KL511", sum_that_starts_anew),
    right(kernel_with_upstream),
    wrong("KL512", kl_div_of_logits, also=("KL502",), options=LOCAL),
    wrong("KL512", exponentials_of_logits, also=("KL502",), options=LOCAL),
    right(of_log_probs, LOCAL),
]
