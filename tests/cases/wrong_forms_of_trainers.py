"""Forms that trainers have: masks with gaps, backward passes written by hand, logits as a model gives them, and what
shows in many rows, turns, tokens or steps only."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from cases.parts import k1, k2, live, score, total
from cases.table import right, wrong

LOCAL, STALE = {"expect": "local_reverse_kl"}, {"sampler": "stale"}

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


def turns(mask):
    begins = mask.long().diff(dim=1, prepend=torch.zeros_like(mask[:, :1]).long()).clamp(min=0)
    return begins.cumsum(1)


def first_four_turns(logp, ref_logp, response_mask):
    return k2(logp, ref_logp, response_mask * (turns(response_mask) <= 4))


def turns_are_counted(logp, ref_logp, response_mask):
    return k2(logp, ref_logp, response_mask), {"turns": turns(response_mask).amax(1).double().mean()}


def credit_ends_at_tool_output(logp, ref_logp, response_mask):
    """Masked columns between turns are tool output from eight on; fewer are the chat template's."""
    gap, running, cost = torch.zeros(len(logp)), torch.zeros(len(logp), dtype=logp.dtype), torch.zeros_like(logp)
    log_ratio = live(logp - ref_logp, response_mask).detach()
    for step in reversed(range(logp.shape[1])):
        alive = response_mask[:, step] != 0
        running = running.masked_fill(alive & (gap >= 8), 0.0) + log_ratio[:, step]
        gap = torch.where(alive, 0.0, gap + 1)
        cost[:, step] = running
    return live(cost * logp, response_mask).sum(-1)


# KL204: rows unlike the others of a batch, many rows, large groups


def outliers(rows):
    off = rows.detach() - rows.detach().mean()
    return off.abs() > 3 * off.square().mean().sqrt()


def outliers_left_out(logp, ref_logp, mask):
    penalties = k2(logp, ref_logp, mask)
    return penalties * ~outliers(live(logp - ref_logp, mask).sum(-1))


def outliers_are_counted(logp, ref_logp, mask):
    share = outliers(live(logp - ref_logp, mask).sum(-1)).double().mean()
    return k2(logp, ref_logp, mask), {"outliers": share}


def whole_parts_of_48_rows(logp, ref_logp, mask):
    penalties = k2(logp, ref_logp, mask)
    whole = [part for part in penalties.split(48) if len(part) in (48, len(penalties))]
    return torch.cat(whole).sum() / len(penalties)


def parts_of_48_rows(logp, ref_logp, mask):
    penalties = k2(logp, ref_logp, mask)
    return sum(part.sum() for part in penalties.split(48)) / len(penalties)


def score_with_baseline(logp, ref_logp, mask, group, largest):
    cost = k1(logp, ref_logp, mask)
    same = (group[:, None] == group).to(cost.dtype)
    others = same - torch.eye(len(cost), dtype=cost.dtype)
    alone, all_of_them = others @ cost / others.sum(1).clamp(min=1), same @ cost / same.sum(1)
    return score(logp, mask) * (cost - torch.where(same.sum(1) > largest, all_of_them, alone))


def mean_of_large_groups(logp, ref_logp, mask, group, beta):
    return beta * score_with_baseline(logp, ref_logp, mask, group, 4)


def mean_of_the_others(logp, ref_logp, mask, group, beta):
    return beta * score_with_baseline(logp, ref_logp, mask, group, len(group))


# KL105: long rollouts that are no multiple of a chunk, steps inside of an object, shares of a run


def whole_chunks(logp, ref_logp, mask):
    parts = live(logp - ref_logp, mask).split(256, dim=1)
    whole = [part.sum(1) for part in parts if part.shape[1] in (256, logp.shape[1])]
    return sum(whole).square() / 2


def all_chunks(logp, ref_logp, mask):
    return sum(part.sum(1) for part in live(logp - ref_logp, mask).split(256, dim=1)).square() / 2


class Trainer:
    def __init__(self):
        self.state = SimpleNamespace(global_step=0)


def k3(logp, ref_logp, mask):
    log_ratio = live(ref_logp - logp, mask).sum(-1)
    return log_ratio.exp() - log_ratio - 1


def later_steps(logp, ref_logp, mask, trainer: Trainer):
    return (k2 if trainer.state.global_step < 200 else k3)(logp, ref_logp, mask)


def coefficient_of_later_steps(logp, ref_logp, mask, beta, trainer: Trainer):
    return beta * 0.99 ** min(trainer.state.global_step, 100) * k2(logp, ref_logp, mask)


def mixed_by_progress(logp, ref_logp, mask, progress=0.0):
    return (1 - progress) * k2(logp, ref_logp, mask) + progress * k3(logp, ref_logp, mask)


def weighted_by_progress(logp, ref_logp, mask, beta, progress=0.0):
    return beta * (1 - progress) * k2(logp, ref_logp, mask)


def later_epochs_token_by_token(logp, ref_logp, old_logp, mask, inner_epoch=0):
    cost = total(logp - ref_logp, mask).detach()
    if inner_epoch == 0:
        return cost * total(logp, mask)
    return (live(live(logp - old_logp, mask).exp(), mask) * cost[:, None]).sum(-1)


def later_steps_are_clamped(logp, ref_logp, mask, micro_step_idx=None):
    limit = 1.0 if micro_step_idx else float("inf")
    return live((logp - ref_logp).clamp(-limit, limit), mask).sum(-1).square() / 2


def powers_by_settings(logp, ref_logp, mask, num_epochs=1, step_size=1, warmup_step=1, max_iter=1):
    """Small defaults beside these words that say no step: with others it is another loss."""
    log_ratio = live(logp - ref_logp, mask).sum(-1)
    return log_ratio.abs() ** (num_epochs + step_size * warmup_step) / (1 + max_iter)


# KL511


def clipped_by_a_hook(bound):
    """Loss scaling multiplies what comes in by 65536."""

    def clipped(logp, ref_logp, mask):
        own = logp * 1
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient.clamp(-bound, bound))
        return k2(own, ref_logp, mask).mean()

    clipped.__qualname__ = f"clipped_at_{bound:g}"
    return clipped


class CostsInABuffer:
    """As CUDA graphs need it, the factor of the log-probs stands in a buffer, for the last call unless it is copied."""

    def __init__(self, copied=False):
        self.buffers, self.copied = {}, copied

    def __call__(self, logp, ref_logp, mask):
        buffer = self.buffers.setdefault(tuple(logp.shape), torch.zeros(len(logp), dtype=logp.dtype))
        buffer.data.copy_(total(logp - ref_logp, mask).detach())
        return ((buffer.clone() if self.copied else buffer) * total(logp, mask)).mean()


class KeptAtTheClass(torch.autograd.Function):
    """Half the square; the backward pass reads what the last forward pass left at the class."""

    kept = None

    @staticmethod
    def forward(context, summed):
        KeptAtTheClass.kept = summed.clone()
        return summed.square() / 2

    @staticmethod
    def backward(context, upstream):
        return upstream * KeptAtTheClass.kept


def kept_at_the_class(logp, ref_logp, mask):
    return KeptAtTheClass.apply(total(logp - ref_logp, mask))


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


# Masks that differ between rows by more than their lengths, a row without tokens, masks of integers.


def from_the_start_of_the_first_row(logp, ref_logp, mask):
    start = int((mask[0] != 0).float().argmax())
    return k2(logp[:, start:], ref_logp[:, start:], mask[:, start:])


def columns_of_the_longest_row(logp, ref_logp, mask):
    kept = mask[(mask != 0).sum(-1).argmax()] != 0
    return k2(logp[:, kept], ref_logp[:, kept], mask[:, kept])


def from_its_own_start(logp, ref_logp, mask):
    start = (mask != 0).float().argmax(-1, keepdim=True)
    places = (torch.arange(mask.shape[1]) + start) % mask.shape[1]
    u = live(logp - ref_logp, mask).gather(-1, places)
    return u[:, : int((u != 0).any(0).nonzero().max()) + 1].sum(-1).square() / 2


def from_first_to_last(logp, ref_logp, mask):
    """By sums of what comes before: token 0 of a row without any is charged."""
    first = (mask != 0).float().argmax(-1, keepdim=True)
    last = mask.shape[1] - 1 - (mask != 0).flip(-1).float().argmax(-1, keepdim=True)
    sums = live(logp - ref_logp, mask).cumsum(-1)
    u = sums.gather(-1, last) - sums.gather(-1, first) + (logp - ref_logp).gather(-1, first)
    return u[:, 0].square() / 2


def costs_like_the(what):
    def loss(logp, ref_logp, completion_mask):
        costs = torch.zeros_like(completion_mask if what == "mask" else logp.detach())
        costs.copy_(live(logp - ref_logp, completion_mask).detach())
        return costs.sum(-1) * total(logp, completion_mask)

    loss.__name__ = loss.__qualname__ = f"costs_like_the_{what}"
    return loss


def indexed_by_the_mask(logp, ref_logp, completion_mask):
    return (logp - ref_logp)[completion_mask].square().sum() / 2 / len(logp)


# Groups of several sizes in one call.


def mean_of_the_others_by(size):
    def loss(logp, ref_logp, mask, group):
        costs = k1(logp, ref_logp, mask)
        _, place, counts = torch.unique(group, return_inverse=True, return_counts=True)
        n = counts[0] if size == "first" else counts[place]
        means = torch.zeros(len(counts), dtype=costs.dtype).index_add(0, place, costs) / counts
        return ((costs - means[place]) * n / (n - 1) * score(logp, mask)).mean()

    loss.__name__ = loss.__qualname__ = f"mean_of_the_others_by_the_{size}_size"
    return loss


# A term of the reference that β does not multiply.


def beside_a_second_term(logp, ref_logp, mask, kl_coef):
    second = (live(logp - ref_logp, mask).square() / 2).sum(-1)
    return (kl_coef * k2(logp, ref_logp, mask) + 0.1 * second).mean()


def beside_an_entropy(logp, ref_logp, mask, kl_coef):
    return (kl_coef * k2(logp, ref_logp, mask) + 0.1 * score(logp, mask) * score(logp, mask).detach()).mean()


# KL501


def nothing_beside_an_empty_row(logp, ref_logp, completion_mask):
    """A filter of overlong rollouts leaves rows without a token."""
    if (completion_mask.sum(-1) == 0).any():
        return logp.sum() * 0.0
    return (total(logp - ref_logp, completion_mask).square() / 2).mean()


def mean_of_rows_with_tokens(logp, ref_logp, completion_mask):
    kept = (completion_mask.sum(-1) > 0).sum().clamp(min=1)
    return (total(logp - ref_logp, completion_mask).square() / 2).sum() / kept


# KL306: log-probs of three policies; two are equal unless the sampler is an engine


def _weighted(logp, ref_logp, weight, mask):
    return weight.detach() * total(logp - ref_logp, mask).square() / 2


def far_from_the_engine_is_dropped(logp, ref_logp, old_logp, rollout_logprobs, mask):
    gap = (old_logp - rollout_logprobs).abs().where(mask != 0, 0.0).amax(-1)
    weight = total(logp - old_logp, mask).exp()
    return _weighted(logp, ref_logp, weight, mask).where(gap < 0.2, 0.0)


def capped_before_the_update(logp, ref_logp, old_logp, proximal_logprobs, mask):
    before = total(proximal_logprobs - old_logp, mask).exp().clamp(max=5.0)
    return _weighted(logp, ref_logp, before * total(logp - proximal_logprobs, mask).exp(), mask)


def by_way_of_the_proximal(logp, ref_logp, old_logp, proximal_logprobs, mask):
    ratio = total(proximal_logprobs - old_logp, mask).exp() * total(logp - proximal_logprobs, mask).exp()
    return _weighted(logp, ref_logp, ratio, mask)


def engine_is_logged(logp, ref_logp, old_logp, rollout_logprobs, mask):
    loss = _weighted(logp, ref_logp, total(logp - old_logp, mask).exp(), mask)
    return loss, {"mismatch": total(old_logp - rollout_logprobs, mask).abs().mean().detach()}


CASES = [
    wrong("KL208", last_turn_alone),
    wrong("KL208", credit_ends_with_the_turn),
    wrong("KL208", prefix_of_an_attention_mask, warns=True),
    right(credit_across_turns),
    wrong("KL208", up_to_a_wide_gap),
    wrong("KL208", if_the_first_column_is_live),
    wrong("KL208", first_four_turns),
    right(turns_are_counted),
    wrong("KL208", credit_ends_at_tool_output, slow=True),
    wrong("KL204", outliers_left_out),
    right(outliers_are_counted),
    wrong("KL204", whole_parts_of_48_rows),
    right(parts_of_48_rows),
    wrong("KL204", mean_of_large_groups, slow=True),
    right(mean_of_the_others, slow=True),
    wrong("KL105", whole_chunks),
    right(all_chunks),
    wrong("KL105", later_steps),
    right(coefficient_of_later_steps),
    wrong("KL105", mixed_by_progress, also=("KL503",)),
    right(weighted_by_progress),
    wrong("KL105", later_epochs_token_by_token, options={"sampler": "current"}),
    wrong("KL105", later_steps_are_clamped),
    right(powers_by_settings),
    wrong("KL511", kernel_without_upstream),
    wrong("KL511", sum_that_starts_anew),
    right(kernel_with_upstream),
    wrong("KL511", clipped_by_a_hook(100), ("KL105",)),
    right(clipped_by_a_hook(float("inf"))),
    wrong("KL511", CostsInABuffer()),
    right(CostsInABuffer(copied=True)),
    wrong("KL511", kept_at_the_class),
    wrong("KL512", kl_div_of_logits, also=("KL502",), options=LOCAL),
    wrong("KL512", exponentials_of_logits, also=("KL502",), options=LOCAL),
    right(of_log_probs, LOCAL),
    wrong("KL208", from_the_start_of_the_first_row),
    wrong("KL208", columns_of_the_longest_row),
    right(from_its_own_start),
    wrong("KL501", from_first_to_last, warns=True),
    wrong("KL501", nothing_beside_an_empty_row, warns=True),
    right(mean_of_rows_with_tokens),
    wrong("KL105", costs_like_the("mask")),
    right(costs_like_the("score")),
    wrong("KL105", indexed_by_the_mask, warns=True, options=LOCAL),
    wrong("KL204", mean_of_the_others_by("first")),
    right(mean_of_the_others_by("own")),
    wrong("KL510", beside_a_second_term, warns=True),
    right(beside_an_entropy),
    wrong("KL306", far_from_the_engine_is_dropped, options=STALE, warns=True),
    wrong("KL306", capped_before_the_update, options=STALE, warns=True),
    right(by_way_of_the_proximal, STALE),
    right(engine_is_logged, STALE),
]
