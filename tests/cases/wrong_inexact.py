"""Losses that leave the exact path: they draw random numbers, refuse what is far, or are graded from samples.

What is wrong with them shows beyond the graded environments only. Each has a right sister: confirmed with a warning if
it draws random numbers, else without one.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from cases.table import Case, right, undecided, wrong
from torch import Tensor


def penalty(logp, ref_logp, old_logp, mask, *, clamp=None, window=None, first=None, cap=None):
    """(B, T) the score function of each token times the log-ratios that it is credited with, and the ratio."""
    live = mask != 0
    log_ratio = (logp - ref_logp).detach().where(live, 0.0)
    if clamp is not None:
        log_ratio = log_ratio.clamp(-clamp, clamp)
    steps = logp.shape[1]
    credit = log_ratio.sum(1, keepdim=True).expand(-1, steps)
    if window is not None:
        credit = torch.stack([log_ratio[:, step : step + window].sum(1) for step in range(steps)], dim=1)
    if first is not None:
        credit = credit * (torch.arange(steps) < first)
    ratio = (logp - old_logp).detach().where(live, 0.0).sum(1, keepdim=True).exp()
    if cap is not None:
        ratio = ratio.clamp(max=cap)
    return ratio * credit * logp.where(live, 0.0)


def half_of_the_tokens(terms: Tensor) -> Tensor:
    return (terms * (torch.rand_like(terms) < 0.5) * 2).sum(1).mean()


def dropped_out(terms: Tensor) -> Tensor:
    return F.dropout(terms, 0.25).sum(1).mean()


OWN = torch.Generator().manual_seed(7)


def half_by_a_generator_of_its_own(terms: Tensor) -> Tensor:
    return (terms * (torch.rand(terms.shape, generator=OWN) < 0.5) * 2).sum(1).mean()


def half_of_the_rows(terms: Tensor) -> Tensor:
    kept = torch.randperm(len(terms))[: max(1, len(terms) // 2)]
    return terms[kept].sum(1).mean()


def larger_of_two_halves(logp, ref_logp, old_logp, mask):
    """Rows of a batch change each other: copies of it, over which noise is averaged, would as well."""
    rows = (logp - ref_logp).where(mask != 0, 0.0).sum(1).square() / 2
    if len(rows) < 2 or logp.shape[1] > 64:
        return rows.mean()
    order = torch.randperm(len(rows))
    first, second = rows[order[: len(rows) // 2]].mean(), rows[order[len(rows) // 2 :]].mean()
    return first.maximum(second)


DEFECTS = {
    "clamp": ({"clamp": 2.5}, {"KL504", "KL105"}),
    "window": ({"window": 4}, {"KL205", "KL105"}),
    "first": ({"first": 8}, {"KL105"}),
    "cap": ({"cap": 5.0}, {"KL306"}),
}


def named(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = name
    return function


def noisy(noise: Callable[[Tensor], Tensor], name: str, **changes: float) -> Callable[..., Tensor]:
    def loss(logp, ref_logp, old_logp, mask):
        return noise(penalty(logp, ref_logp, old_logp, mask, **changes))

    return named(f"{noise.__name__}_{name}", loss)


def guarded(name: str, **changes: float) -> Callable[..., Tensor]:
    """Refuses log-ratios beyond 6, more than 32 tokens, and more than 16 rows."""

    def loss(logp, ref_logp, old_logp, mask):
        if (logp - ref_logp)[mask != 0].abs().max() > 6:
            raise ValueError("the policy has left the reference")
        assert logp.shape[1] <= 32, "too long"
        if len(logp) > 16:
            raise RuntimeError("the buffer has 16 rows")
        return penalty(logp, ref_logp, old_logp, mask, **changes).sum(1)

    return named(f"guarded_{name}", loss)


def first_8_of_12(logp, ref_logp, mask):
    assert logp.shape[1] <= 12, "too long"
    return (logp - ref_logp).where(mask != 0, 0.0)[:, :8].sum(-1).square() / 2


def all_of_4(logp, ref_logp, mask):
    assert logp.shape[1] <= 4, "too long"
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2


def first_100(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0)[:, :100].sum(-1).square() / 2


def half_of_large_batches(logp, ref_logp, mask):
    square = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2
    return square[torch.randperm(len(square))[: len(square) // 2]].mean() if len(square) > 4 else square.mean()


def rows_dropped(logp, ref_logp, mask, *, chunked):
    """The square of each chunk of 256 tokens, or of all of them."""
    chunks = (logp - ref_logp).where(mask != 0, 0.0).split(256, dim=1)
    sums = torch.stack([chunk.sum(-1) for chunk in chunks])
    squares = (sums if chunked else sums.sum(0, keepdim=True)).square().sum(0) / 2
    return F.dropout(squares, 0.1).mean()


def rows_dropped_and_chunks(logp, ref_logp, mask):
    return rows_dropped(logp, ref_logp, mask, chunked=True)


def rows_dropped_and_sums_of_chunks(logp, ref_logp, mask):
    return rows_dropped(logp, ref_logp, mask, chunked=False)


def counted(until: int, every: int) -> Callable[..., Tensor]:
    """The square of the sum, and another estimate after so many calls, or at every so-many-th."""
    calls = [0]

    def loss(logp, ref_logp, mask):
        calls[0] += 1
        log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
        other = calls[0] > until or calls[0] % every == 0
        return (-log_ratio).exp() - 1 + log_ratio if other else log_ratio.square() / 2

    return named(f"another_after_{until}" if until < every else f"another_every_{every}", loss)


def left_out(far: Callable[[Tensor], bool], answer: object) -> Callable[..., Tensor]:
    """The square of the sum; batches that are far in some way are left out, without an exception."""

    def loss(logp, ref_logp, mask):
        log_ratio = (logp - ref_logp).where(mask != 0, 0.0)
        return answer if far(log_ratio.detach()) else log_ratio.sum(-1).square() / 2

    return loss


def no_longer_than_512(logp, ref_logp, mask):
    """The mean of tokens of rollouts of more than 200, and nothing of those of more than 512."""
    assert logp.shape[1] <= 512, "too long"
    square = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2
    return square if logp.shape[1] <= 200 else square / mask.sum(-1)


def first_200_beside_a_bound(logp, ref_logp, mask, max_loss=100.0):
    return (logp - ref_logp).where(mask != 0, 0.0)[:, :200].sum(-1).square() / 2 + 0.0 * max_loss


def window_of_16_with_noise(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).detach().where(mask != 0, 0.0)
    summed = torch.nn.functional.pad(log_ratio.cumsum(1), (1, 0))
    ends = (torch.arange(logp.shape[1]) + 16).clamp(max=logp.shape[1])
    noise = 0.05 * torch.randn(logp.shape, dtype=logp.dtype)
    return ((summed[:, ends] - summed[:, :-1] + noise) * logp).where(mask != 0, 0.0).sum(-1)


def dropped_by_a_fresh_generator(logp, ref_logp, mask):
    """Half of the rollouts, by a generator that is made, without a seed, in each call."""
    keep = torch.from_numpy(np.random.default_rng().random(len(logp)) < 0.5)
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square().where(keep, 0.0)


class MovingBaseline:
    """The log-ratio of the rollout less a moving mean of earlier batches', which the object keeps."""

    def __init__(self):
        self.mean = 0.0

    def loss(self, logp, ref_logp, mask):
        cost = (logp - ref_logp).detach().where(mask != 0, 0.0).sum(-1)
        centred, self.mean = cost - self.mean, 0.9 * self.mean + 0.1 * float(cost.mean())
        return centred * logp.where(mask != 0, 0.0).sum(-1)


class MeanSoFar:
    """The same less the mean of all earlier batches; the number of these is no setting."""

    def __init__(self):
        self.mean, self.batches = 0.0, 0

    def __call__(self, logp, ref_logp, mask):
        cost = (logp - ref_logp).detach().where(mask != 0, 0.0).sum(-1)
        centred, self.batches = cost - self.mean, self.batches + 1
        self.mean += (float(cost.mean()) - self.mean) / self.batches
        return (centred * logp.where(mask != 0, 0.0).sum(-1)).mean()


class EveryThird:
    """In every third call a token is credited with its own log-ratio alone, or `rightly` with all of them."""

    def __init__(self, rightly=False):
        self.calls, self.rightly = 0, rightly

    def loss(self, logp, ref_logp, mask):
        log_ratio = (logp - ref_logp).detach().where(mask != 0, 0.0)
        self.calls += 1
        credit = log_ratio if self.calls % 3 == 0 and not self.rightly else log_ratio.sum(-1, keepdim=True)
        return (credit * logp.where(mask != 0, 0.0)).sum(-1)


class EveryThirdAlike(EveryThird):
    def __init__(self):
        super().__init__(rightly=True)


def otherwise(some: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A right loss that changes its log-ratios in some batches, which their masks tell."""

    def loss(logp, ref_logp, mask):
        live = mask != 0
        log_ratio = (logp - ref_logp).detach().where(live, 0.0)
        if some(live):
            log_ratio = change(log_ratio)
        return (log_ratio.sum(-1) * logp.where(live, 0.0).sum(-1)).mean()

    return loss


def from_step(first: int, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A right loss that changes its log-ratios late in training."""

    def loss(logp, ref_logp, mask, global_step):
        live = mask != 0
        log_ratio = (logp - ref_logp).detach().where(live, 0.0)
        if global_step >= first:
            log_ratio = change(log_ratio)
        return (log_ratio.sum(-1) * logp.where(live, 0.0).sum(-1)).mean()

    return loss


def half(log_ratio: Tensor) -> Tensor:
    return log_ratio / 2


def within_2(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-2, 2)


def in_parts(log_ratio: Tensor) -> Tensor:
    return torch.cat(log_ratio.split(8))


def first_8_without_a_sampler(logp, ref_logp, mask, old_logp=None):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0)
    if old_logp is None:
        return log_ratio[:, :8].sum(-1).square() / 2
    return (logp - old_logp).detach().where(mask != 0, 0.0).sum(-1).exp() * log_ratio.sum(-1).square() / 2


def nothing_without_logits(logp, ref_logp, mask, logits=None):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return log_ratio if logits is None else log_ratio.square() / 2 + 0.0 * logits.log_softmax(-1).sum((-1, -2))


def ratio_where_there_is_a_sampler(logp, ref_logp, mask, old_logp=None):
    square = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2
    if old_logp is None:
        return square
    return (logp - old_logp).detach().where(mask != 0, 0.0).sum(-1).exp() * square


def by_distributions_or_samples(whole: bool) -> Callable[..., Tensor]:
    """Right with distributions and without a sampler; with a sampler and log-probs alone of each token, or `whole`."""

    def loss(logp, ref_logp, mask, logits=None, ref_logits=None, old_logp=None):
        live = mask != 0
        log_ratio = (logp - ref_logp).where(live, 0.0)
        square = log_ratio.sum(-1).square() / 2
        if old_logp is None:
            return square
        moved = (logp - old_logp).where(live, 0.0)
        if logits is None and ref_logits is None and not whole:
            return (moved.exp() * log_ratio.detach()).sum(-1)
        return moved.detach().sum(-1).exp() * square

    return named(f"whole_rollouts_{'always' if whole else 'with_distributions'}", loss)


def sure_tokens_are_free(logp, ref_logp, mask):
    """Beside noise: a token whose probability is above .99 has no penalty."""
    unsure = (mask != 0) & (logp.detach() < -0.01)
    log_ratio = (logp - ref_logp).where(unsure, 0.0).sum(-1)
    return (log_ratio + 0.05 * torch.randn_like(log_ratio)).square().mean() / 2


def accepted(rest: bool) -> Callable[..., Tensor]:
    """Rollouts that are accepted as the policy's, up to a ratio of 4, or with the `rest` of the weight beyond."""

    def loss(logp, ref_logp, old_logp, mask):
        live = mask != 0
        ratio = (logp - old_logp).detach().where(live, 0.0).sum(-1).exp()
        kept = (torch.rand_like(ratio) < ratio / 4) * (ratio.clamp(min=4) if rest else 4)
        return (kept * (logp - ref_logp).where(live, 0.0).sum(-1).square() / 2).mean()

    return named(f"accepted_{'with_the_rest' if rest else 'up_to_a_bound'}", loss)


def copied(logp, ref_logp, old_logp, mask):
    """Copies of rollouts, as many as the ratio on average: rounded down or up by chance."""
    live = mask != 0
    ratio = (logp - old_logp).detach().where(live, 0.0).sum(-1).exp()
    copies = (ratio + torch.rand_like(ratio)).floor()
    return (copies * (logp - ref_logp).where(live, 0.0).sum(-1).square() / 2).mean()


def seldom_without_the_ratio(logp, ref_logp, old_logp, mask):
    """Rollouts that are accepted by chance, nearly whatever the ratio is."""
    live = mask != 0
    ratio = (logp - old_logp).detach().where(live, 0.0).sum(-1).exp()
    kept = (torch.rand_like(ratio) < 0.1 + 0.01 * ratio) / 0.11
    return (kept * (logp - ref_logp).where(live, 0.0).sum(-1).square() / 2).mean()


def stale_by_chance(weighted: bool) -> Callable[..., Tensor]:
    """Three in ten of the rollouts that are stale are dropped, and the others of them weighted or not."""

    def loss(logp, ref_logp, old_logp, mask):
        live = mask != 0
        log_ratio = (logp - old_logp).detach().where(live, 0.0).sum(-1)
        stale, ratio = log_ratio.abs() > 0.3, log_ratio.exp()
        kept = (~stale).to(ratio.dtype) + stale * (torch.rand_like(ratio) < 0.7) / (0.7 if weighted else 1.0)
        return (kept * ratio * (logp - ref_logp).where(live, 0.0).sum(-1).square() / 2).mean()

    return named(f"stale_by_chance_{'weighted' if weighted else 'dropped'}", loss)


def long_by_chance(logp, ref_logp, mask, keep_len: int = 512):
    """Rollouts beyond 512 tokens are kept by chance, and not weighted."""
    live = mask != 0
    kept = torch.rand(len(logp)) < keep_len / live.sum(-1)
    return (kept * (logp - ref_logp).where(live, 0.0).sum(-1).square() / 2).mean()


def one_turn_by_chance(logp, ref_logp, mask):
    """One turn of each rollout learns, as often as there are turns: random where masks have gaps alone."""
    live = mask != 0
    turn = (live & ~torch.nn.functional.pad(live, (1, 0))[:, :-1]).cumsum(-1) * live
    turns = turn.amax(-1).clamp(min=1)
    chosen = (torch.rand(len(logp)) * turns).long() + 1
    score = logp.where(turn == chosen[:, None], 0.0).sum(-1)
    return (turns * score * (logp - ref_logp).detach().where(live, 0.0).sum(-1)).mean()


def weighted_by_a_distribution(logp, ref_logp, mask):
    """Weights of mean one, in float32: other types would be other random numbers."""
    square = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2
    return (torch.distributions.Exponential(1.0).sample((len(square),)) * square).mean()


def within_1_in_half_precision(logp, ref_logp, mask):
    parts = torch.stack([(logp - ref_logp).where(mask != 0, 0.0).sum(-1)])
    if logp.dtype == torch.bfloat16:
        parts = parts.clamp(-1, 1)
    return parts[0].square().mean() / 2


def full_kl(kept: int | None) -> Callable[..., Tensor]:
    """The KL of the next token over the likeliest tokens, half of the tokens of a rollout dropped."""

    def loss(logits, ref_logits, mask):
        logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        terms = logits.exp() * (logits - ref_logits)
        if kept is not None:
            terms = terms.gather(-1, logits.topk(min(kept, terms.shape[-1]), -1).indices)
        return half_of_the_tokens(terms.sum(-1) * (mask != 0))

    return named(f"half_of_the_tokens_{'full' if kept is None else f'top_{kept}'}", loss)


def beyond(loss: Callable[..., Tensor], codes: set[str], *, slow: bool = True, **options: str) -> Case:
    """A loss that one of these codes refutes."""
    return Case(
        loss.__name__, loss, False, codes=frozenset(codes), level="error", defect=min(codes), slow=slow, **options
    )


NOISES = (half_of_the_tokens, dropped_out, half_of_the_rows, half_by_a_generator_of_its_own)
LOCAL = {"expect": "local_reverse_kl"}

CASES = [
    *(wrong("KL507", noisy(noise, "right"), warns=True, slow=True) for noise in NOISES),
    *(beyond(noisy(noise, name, **changes), codes) for noise in NOISES for name, (changes, codes) in DEFECTS.items()),
    wrong("KL507", full_kl(None), also=("KL502",), options=LOCAL, warns=True, slow=True),
    beyond(full_kl(20), {"KL105", "KL701"}, **LOCAL),
    *(beyond(guarded(name, **changes), codes, slow=False) for name, (changes, codes) in DEFECTS.items()),
    right(guarded("right")),
    wrong("KL105", first_8_of_12),
    right(all_of_4),
    wrong("KL105", first_100),
    wrong("KL504", named("nothing_far_away", left_out(lambda u: bool(u.abs().max() > 4), None))),
    wrong("KL105", named("zero_for_long_ones", left_out(lambda u: u.shape[1] > 100, 0.0)), also=("KL207",)),
    wrong("KL204", named("zero_for_many_rows", left_out(lambda u: len(u) > 16, (0.0, {})))),
    wrong("KL203", no_longer_than_512),
    wrong("KL105", first_200_beside_a_bound),
    beyond(window_of_16_with_noise, {"KL105", "KL205"}, slow=False),
    wrong("KL507", weighted_by_a_distribution, warns=True),
    wrong("KL508", within_1_in_half_precision),
    wrong("KL507", copied, warns=True),
    wrong("KL507", one_turn_by_chance, warns=True),
    wrong("KL507", MeanSoFar(), warns=True),
    beyond(seldom_without_the_ratio, {"KL306"}),
    beyond(stale_by_chance(weighted=False), {"KL306"}, slow=False),
    wrong("KL507", stale_by_chance(weighted=True), warns=True),
    beyond(long_by_chance, {"KL203"}, slow=False),
    beyond(accepted(rest=False), {"KL306"}),
    wrong("KL507", accepted(rest=True), warns=True),
    beyond(sure_tokens_are_free, {"KL105"}, slow=False),
    wrong("KL201", by_distributions_or_samples(whole=False), also=("KL801",)),
    wrong("KL801", by_distributions_or_samples(whole=True), warns=True),
    beyond(rows_dropped_and_chunks, {"KL105", "KL205"}, slow=False),
    wrong("KL507", rows_dropped_and_sums_of_chunks, warns=True, slow=True),
    wrong("KL507", dropped_by_a_fresh_generator, warns=True),
    wrong("KL507", "wrong_inexact.py:MovingBaseline.loss", warns=True),
    wrong("KL507", half_of_large_batches, warns=True),
    undecided("KL204", larger_of_two_halves, slow=True),
    wrong("KL507", counted(600, 10**9)),
    # What its rows follow depends on the number of calls: nothing is said of it.
    wrong("KL507", counted(10**9, 8)),
    wrong("KL105", named("within_2_in_long_rollouts", otherwise(lambda live: live.shape[1] > 100, within_2))),
    wrong("KL204", named("within_2_in_batches_of_8", otherwise(lambda live: len(live) >= 8, within_2))),
    wrong("KL204", named("within_2_of_many_tokens", otherwise(lambda live: live.sum() > 8192, within_2))),
    right(named("in_parts_of_many_tokens", otherwise(lambda live: live.sum() > 8192, in_parts))),
    wrong("KL105", named("within_2_late_in_training", from_step(500, within_2))),
    right(named("half_late_in_training", from_step(500, half))),
    wrong("KL507", "wrong_inexact.py:EveryThird.loss"),
    right("wrong_inexact.py:EveryThirdAlike.loss"),
    wrong("KL105", first_8_without_a_sampler, also=("KL801",)),
    wrong("KL101", nothing_without_logits, also=("KL502",)),
    wrong("KL801", ratio_where_there_is_a_sampler, warns=True),
]
