"""What trainers have and small environments do not: thousands of tokens, rows and ids, drift, rewards, other runs.

Each wrong loss has a sister that does the same rightly, or that differs in what decides.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases.parts import k2, total
from cases.table import right, wrong

LOCAL = {"expect": "local_reverse_kl"}
FUSED = False


def live_of(mask):
    return mask != 0


# Sizes that no number of the code names as it is


def halved_every_1024_tokens(logp, ref_logp, mask):
    """Credit for later log-ratios, halved for each thousand tokens in between."""
    cost = (logp - ref_logp).where(mask != 0, 0.0).detach()
    position = torch.arange(cost.shape[1])
    lag = position - position[:, None]
    weight = torch.exp2(-torch.div(lag, 1024, rounding_mode="floor").to(cost.dtype)) * (lag >= 0)
    return ((cost @ weight.T) * logp.where(mask != 0, 0.0)).sum(-1).mean()


def credited_in_full(logp, ref_logp, mask):
    cost = (logp - ref_logp).where(mask != 0, 0.0).detach()
    return (cost.flip(1).cumsum(1).flip(1) * logp.where(mask != 0, 0.0)).sum(-1).mean()


def terms(logits, ref_logits, mask):
    """The summands of the KL of each next token."""
    own, other = (one.where(live_of(mask)[..., None], 0.0).log_softmax(-1) for one in (logits, ref_logits))
    return own.exp() * (own - other)


def half_of_large_vocabularies(logits, ref_logits, mask):
    """Beyond 4,096 ids one half of them stands for both."""
    kl = terms(logits, ref_logits, mask)
    kl = 2 * kl[..., : kl.shape[-1] // 2] if kl.shape[-1].bit_length() > 12 else kl
    return total(kl.sum(-1), mask).mean()


def large_vocabularies_in_halves(logits, ref_logits, mask):
    kl = terms(logits, ref_logits, mask)
    if kl.shape[-1].bit_length() > 12:
        half = kl.shape[-1] // 2
        kl = torch.stack([kl[..., :half].sum(-1), kl[..., half:].sum(-1)], -1)
    return total(kl.sum(-1), mask).mean()


def sorted_pairs_of_many(logp, ref_logp, mask):
    """From 288 rows on, pairs of rollouts, the one that drifted most with the one that drifted least."""
    log_ratio = total(logp - ref_logp, mask)
    if len(log_ratio) >> 5 < 9:
        return (log_ratio.square() / 2).mean()
    order, half = log_ratio.detach().argsort(), len(log_ratio) // 2
    return ((log_ratio[order[-half:]] - log_ratio[order[:half].flip(0)]).square() / 4).mean()


def sorted_rows_of_many(logp, ref_logp, mask):
    log_ratio = total(logp - ref_logp, mask)
    order = log_ratio.detach().argsort() if len(log_ratio) >> 5 >= 9 else torch.arange(len(log_ratio))
    return (log_ratio[order].square() / 2).mean()


def at_most_a_thousand_nats(logp, ref_logp, mask, max_batch_nats=1000.0):
    """The penalty of a batch is scaled down to so many nats."""
    log_ratio = total(logp - ref_logp, mask)
    return (max_batch_nats / log_ratio.detach().abs().sum().clamp(min=1e-8)).clamp(max=1.0) * (
        log_ratio.square() / 2
    ).mean()


def mean_of_buckets(logp, ref_logp, mask):
    """The mean over buckets of 128 tokens, of rollouts in a bucket."""
    bucket, square = live_of(mask).sum(-1) >> 7, total(logp - ref_logp, mask).square() / 2
    return torch.stack([square[bucket == one].mean() for one in bucket.unique()]).mean()


def sum_of_buckets(logp, ref_logp, mask):
    bucket, square = live_of(mask).sum(-1) >> 7, total(logp - ref_logp, mask).square() / 2
    return torch.stack([square[bucket == one].sum() for one in bucket.unique()]).sum() / len(square)


def offsets_in_sixteen_bits(logp, ref_logp, mask):
    flat, lengths = (logp - ref_logp)[live_of(mask)], live_of(mask).sum(-1)
    ends = lengths.cumsum(0, dtype=torch.int16)
    parts = [flat[start:end].sum() for start, end in zip(F.pad(ends, (1, 0))[:-1].tolist(), ends.tolist(), strict=True)]
    return (torch.stack(parts).square() / 2).mean()


def offsets_in_64_bits(logp, ref_logp, mask):
    flat, lengths = (logp - ref_logp)[live_of(mask)], live_of(mask).sum(-1)
    return (torch.stack([one.sum() for one in flat.split(lengths.tolist())]).square() / 2).mean()


@dataclass
class Packing:
    token_budget_bits: int = 16


def within_a_budget(logp, ref_logp, mask, config: Packing):
    """Rollouts beyond 65,536 tokens of a batch are left for the next one."""
    fits = live_of(mask).sum(-1).cumsum(0) <= 1 << config.token_budget_bits
    return (total(logp - ref_logp, mask).square() / 2 * fits).mean()


# Drift


def without_much_drift(logp, ref_logp, mask):
    """Rollouts of at least 200 tokens that left the reference by a tenth of a nat a token have no penalty."""
    log_ratio, length = total(logp - ref_logp, mask), live_of(mask).sum(-1)
    gone = (length >= 200) & (log_ratio.detach() > 0.1 * length)
    return (log_ratio.square() / 2).where(~gone, 0.0).mean()


def without_loops(logp, ref_logp, mask):
    """Rollouts with eight tokens in a row that are far from the reference have none."""
    log_ratio = (logp - ref_logp).where(live_of(mask), 0.0)
    square = log_ratio.sum(-1).square() / 2
    if log_ratio.shape[1] < 8:
        return square.mean()
    far = (log_ratio.detach().abs() > 0.5).unfold(1, 8, 1).all(-1).any(-1)
    return square.where(~far, 0.0).mean()


def logs_at_most_twelve(logp, ref_logp, mask, beta):
    log_ratio = total(logp - ref_logp, mask)
    return beta * (log_ratio.square() / 2).mean(), {"kl": log_ratio.detach().clamp(-12.0, 12.0).mean()}


def logs_all(logp, ref_logp, mask, beta):
    log_ratio = total(logp - ref_logp, mask)
    return beta * (log_ratio.square() / 2).mean(), {"kl": log_ratio.detach().mean()}


# Rewards and prompts


def free_where_rewards_are_large(logp, ref_logp, mask, rewards, beta):
    return beta * (total(logp - ref_logp, mask).square() / 2 * (rewards <= 4.0)).mean()


def free_where_prompts_are_hard(logp, ref_logp, mask, rewards, group, beta):
    """Prompts of which few rollouts, but some, are solved have no penalty."""
    _, slot = group.unique(return_inverse=True)
    solved = torch.zeros(int(slot.max()) + 1, dtype=logp.dtype).index_add(0, slot, (rewards > 0.5).to(logp.dtype))
    share = (solved / slot.bincount())[slot]
    hard = (share > 0) & (share <= 0.125)
    return beta * (total(logp - ref_logp, mask).square() / 2).where(~hard, 0.0).mean()


def policy_gradient_beside(logp, ref_logp, mask, rewards, advantages, beta):
    """Rewards decide the policy loss alone, whatever they are."""
    penalty = total(logp - ref_logp, mask).square() / 2
    return (beta * penalty - (advantages * (rewards <= 4.0)) * total(logp, mask)).mean()


def mean_over_a_range_of_prompts(logp, ref_logp, mask, group):
    slot, square = group - group.min(), total(logp - ref_logp, mask).square() / 2
    sums, rows = (torch.zeros(int(slot.max()) + 1, dtype=logp.dtype) for _ in range(2))
    sums, rows = sums.index_add(0, slot, square), rows.index_add(0, slot, torch.ones_like(square.detach()))
    return (sums / rows.clamp(min=1)).mean()


def share_of_the_step(logp, ref_logp, mask, num_items_in_batch):
    """A mean over rollouts, times the share of this batch in the tokens of the optimizer's step."""
    return live_of(mask).sum() / num_items_in_batch * (total(logp - ref_logp, mask).square() / 2).mean()


# Surroundings


def written_once_where_deterministic(logp, ref_logp, mask):
    """Tokens are added up by their rollout, and only the last is kept where that has to be deterministic."""
    rows, flat = live_of(mask).nonzero()[:, 0], (logp - ref_logp)[live_of(mask)]
    sums = flat.new_zeros(len(logp))
    sums = (
        sums.index_put((rows,), flat) if torch.are_deterministic_algorithms_enabled() else sums.index_add(0, rows, flat)
    )
    return (sums.square() / 2).mean()


def added_up_where_deterministic(logp, ref_logp, mask):
    rows, flat = live_of(mask).nonzero()[:, 0], (logp - ref_logp)[live_of(mask)]
    sums = flat.new_zeros(len(logp))
    sums = (
        sums.index_put((rows,), flat, accumulate=True)
        if torch.are_deterministic_algorithms_enabled()
        else sums.index_add(0, rows, flat)
    )
    return (sums.square() / 2).mean()


def another_with_a_kernel(logp, ref_logp, mask):
    square = total(logp - ref_logp, mask).square() / 2
    return (square / live_of(mask).sum(-1).clamp(min=1) if FUSED else square).mean()


def the_same_with_a_kernel(logp, ref_logp, mask):
    return ((total(logp - ref_logp, mask) ** 2 if FUSED else total(logp - ref_logp, mask).square()) / 2).mean()


def rows_within_two_seconds(logp, ref_logp, mask):
    """A rollout whose turn comes two seconds after the first has no penalty."""
    began, kept = time.perf_counter(), []
    for row in range(len(logp)):
        in_time = time.perf_counter() - began < 2
        square = total(logp[row : row + 1] - ref_logp[row : row + 1], mask[row : row + 1]).square() / 2
        kept.append(square if in_time else 0 * square)
    return torch.cat(kept).mean()


def rows_that_are_timed(logp, ref_logp, mask):
    began = time.perf_counter()
    square = total(logp - ref_logp, mask).square() / 2
    return square.mean(), {"seconds": time.perf_counter() - began}


# Symmetric under a reversal of three rows, and not under others


def mean_of_the_rows_beside(logp, ref_logp, mask):
    """A baseline of neighbours, which differ in number at both ends: right, in batches of any size."""
    log_ratio, score = total(logp - ref_logp, mask).detach(), total(logp, mask)
    padded = F.pad(log_ratio, (1, 1))
    beside = F.pad(torch.ones_like(log_ratio), (1, 1))
    baseline = (padded[:-2] + padded[2:]) / (beside[:-2] + beside[2:]).clamp(min=1)
    return ((log_ratio - baseline) * score).mean()


# Ratios to the sampler that are unlike


def weighed(logp, ref_logp, old_logp, mask):
    """Ratios (B,), which share of them is effective, and the term of each rollout."""
    live = live_of(mask)
    ratio = (logp - old_logp).detach().where(live, 0.0).sum(-1).exp()
    return ratio, ratio.sum().square() / ratio.square().sum() / len(ratio), k2(logp, ref_logp, mask)


def resampled(logp, ref_logp, old_logp, mask):
    """Rollouts are drawn by their ratios where few of them are effective; the mean ratio is lost."""
    ratio, effective, square = weighed(logp, ref_logp, old_logp, mask)
    if effective > 0.7:
        return (ratio * square).mean()
    return square[torch.multinomial(ratio.clamp(max=2.0), len(ratio), replacement=True)].mean()


def without_ratios_where_few_are_effective(logp, ref_logp, old_logp, mask):
    ratio, effective, square = weighed(logp, ref_logp, old_logp, mask)
    return ((ratio if effective > 0.3 else 1.0) * square).mean()


def normalised_where_few_are_effective(logp, ref_logp, old_logp, mask):
    ratio, effective, square = weighed(logp, ref_logp, old_logp, mask)
    return ((ratio if effective > 0.3 else ratio / ratio.mean()) * square).mean()


def warns_where_few_are_effective(logp, ref_logp, old_logp, mask):
    ratio, effective, square = weighed(logp, ref_logp, old_logp, mask)
    return {"loss": (ratio * square).mean(), "effective": float(effective)}


# Rows that are matched, right in batches of two and wrong in those that trainers have


def head_beside_others(logits, ref_logits, mask):
    """The KL of the 50 likeliest next tokens, less that of the row before, which has no gradient."""
    if len(logits) < 2:
        raise ValueError("needs pairs")
    top = logits.log_softmax(-1).topk(min(50, logits.shape[-1]), -1)
    each = top.values.exp() * (top.values - ref_logits.log_softmax(-1).gather(-1, top.indices))
    kl = each.sum(-1).where(live_of(mask), 0.0)
    return (kl - kl.roll(1, 0).detach()).sum(-1).mean()


def by_length(mask):
    return live_of(mask).sum(-1).argsort(stable=True)


def pairs(log_ratio):
    """A quarter of the squared difference of each two neighbours, in a ring."""
    if len(log_ratio) < 2:
        raise ValueError("needs pairs")
    return ((log_ratio - log_ratio.roll(1, 0)).square() / 4).mean()


def pairs_by_length(logp, ref_logp, mask):
    return pairs(total(logp - ref_logp, mask)[by_length(mask)])


def pairs_by_log_ratio(logp, ref_logp, mask):
    return pairs(total(logp - ref_logp, mask).sort().values)


def pairs_as_they_stand(logp, ref_logp, mask):
    return pairs(total(logp - ref_logp, mask))


def centred_in_parts(one, parts):
    """Numbers (B,) less the mean of the others of their part, an index each; alone in one they stay as they are."""
    centred = one.clone()
    for part in parts:
        if len(part) > 1:
            centred[part] = one[part] - (one[part].sum() - one[part]) / (len(part) - 1)
    return centred


def sorted_micro_batches(logp, ref_logp, mask, micro_batch_size: int = 4):
    cost = centred_in_parts(total(logp - ref_logp, mask).detach(), by_length(mask).split(micro_batch_size))
    return (cost * total(logp, mask)).mean()


def micro_batches(logp, ref_logp, mask, micro_batch_size: int = 4):
    cost = centred_in_parts(total(logp - ref_logp, mask).detach(), torch.arange(len(logp)).split(micro_batch_size))
    return (cost * total(logp, mask)).mean()


def halves_of_a_group(logp, ref_logp, mask, group):
    """Short and long half of a prompt's rollouts, from eight on, have baselines of their own."""
    parts = []
    for one in group.unique():
        rows = (group == one).nonzero().squeeze(1)
        rows = rows[by_length(mask[rows])]
        parts += rows.chunk(2) if len(rows) >= 8 else [rows]
    return (centred_in_parts(total(logp - ref_logp, mask).detach(), parts) * total(logp, mask)).mean()


class HistoryOfPrompts:
    """A baseline of each prompt from earlier batches, in lists that are made when they are needed."""

    itself = False

    def __init__(self):
        self.seen = defaultdict(list)

    def __call__(self, logp, ref_logp, mask, group):
        cost, ids = total(logp - ref_logp, mask).detach(), group.tolist()
        kept = {one: list(numbers) for one, numbers in self.seen.items()}
        for one, number in zip(ids, cost.tolist(), strict=True):
            self.seen[one].append(number)
        used = [(self.seen if self.itself else kept).get(one, [])[-16:] for one in ids]
        base = torch.tensor([sum(one) / max(len(one), 1) for one in used], dtype=cost.dtype)
        return ((cost - base) * total(logp, mask)).mean()


class HistoryAndItself(HistoryOfPrompts):
    """The same with the rollout itself."""

    itself = True


CASES = [
    wrong("KL204", pairs_by_length, ("KL206",)),
    wrong("KL204", pairs_by_log_ratio, ("KL206",)),
    wrong("KL206", pairs_as_they_stand, warns=True),
    wrong("KL105", head_beside_others, ("KL502",), options=LOCAL),
    wrong("KL204", sorted_micro_batches, ("KL206",)),
    wrong("KL206", micro_batches, warns=True),
    wrong("KL204", halves_of_a_group),
    wrong("KL507", HistoryOfPrompts(), warns=True),
    wrong("KL105", HistoryAndItself(), ("KL106", "KL507")),
    wrong("KL204", resampled),
    wrong("KL204", without_ratios_where_few_are_effective),
    wrong("KL204", normalised_where_few_are_effective),
    right(warns_where_few_are_effective),
    wrong("KL204", mean_of_buckets),
    right(sum_of_buckets),
    wrong("KL205", halved_every_1024_tokens, slow=True),
    right(credited_in_full),
    wrong("KL105", half_of_large_vocabularies, options=LOCAL),
    right(large_vocabularies_in_halves, LOCAL),
    wrong("KL204", sorted_pairs_of_many),
    right(sorted_rows_of_many),
    wrong("KL204", offsets_in_sixteen_bits),
    right(offsets_in_64_bits),
    wrong("KL204", within_a_budget),
    wrong("KL204", at_most_a_thousand_nats),
    wrong("KL105", without_much_drift, warns=True),
    wrong("KL105", without_loops, warns=True),
    wrong("KL601", logs_at_most_twelve, warns=True),
    right(logs_all, logs=True),
    wrong("KL105", free_where_rewards_are_large),
    wrong("KL105", free_where_prompts_are_hard),
    right(policy_gradient_beside),
    wrong("KL105", mean_over_a_range_of_prompts, ("KL206",)),
    wrong("KL206", share_of_the_step),
    wrong("KL105", written_once_where_deterministic),
    right(added_up_where_deterministic),
    wrong("KL105", another_with_a_kernel, warns=True),
    right(the_same_with_a_kernel),
    wrong("KL105", rows_within_two_seconds),
    right(rows_that_are_timed),
    right(mean_of_the_rows_beside),
]
