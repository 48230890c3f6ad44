"""The expected gradient and its second moment equal those of one backward pass per rollout, in every environment."""

import functools
import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from moments_plain import ENVIRONMENTS, drawn, every_batch, every_group, moments_by_hand, plain, plain_batch
from torch.utils.checkpoint import checkpoint
from weekly import spread

from kltest.environments import Instance, bandit, mdp, ngram, ragged, sequence
from kltest.errors import TargetError, UsageError
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.moments import BatchOfOneError, enumeration, exact, exact_batches
from kltest.moments.differentiate import gradients_at
from kltest.moments.reduction import probe
from kltest.rollout import Rollout

# Two sums of the same terms in another order, in float64.
EXACT = 1e-12


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 + logp - ref_logp


def k2_sequence(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(dim=1) ** 2 / 2


def full(logits, ref_logits):
    return (logits.exp() * (logits - ref_logits)).sum(dim=-1)


def full_and_sampled(logits, ref_logits, logp, ref_logp, tokens):
    """Both leaves at once, and the logits a second time through a gather."""
    again = logits.gather(-1, tokens[..., None])[..., 0]
    return full(logits, ref_logits) + (logp - ref_logp) ** 2 + again.exp() * logp


def ratio(logp, old_logp, ref_logp):
    return (logp - old_logp).exp() * (logp - ref_logp).detach()


def neighbours(logp, mask):
    """Each token with the one after it, so that the tokens of a rollout are not apart."""
    masked = logp * mask
    return (masked[:, 1:] * masked[:, :-1]).sum(dim=1) + masked[:, 0] ** 3


def rewarded(logp, advantage, reward, mask):
    return -((logp * mask).sum(dim=1) * advantage) + reward * (logp * mask).sum(dim=1) ** 2


def scalar(logp, ref_logp, mask):
    return (k3(logp, ref_logp) * mask).sum() / len(logp)


LOSSES = [k3, k2_sequence, full, full_and_sampled, ratio, neighbours, rewarded, scalar]


def agrees(moments, expected, second):
    scale = np.sqrt(second)
    assert np.abs(moments.gradient - expected).max() <= EXACT * scale
    assert abs(moments.second_moment - second) <= EXACT * second
    assert abs(moments.variance - (second - (expected**2).sum())) <= EXACT * second


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("environment", spread(2, ENVIRONMENTS))
def test_moments_equal_one_backward_pass_per_rollout(environment, loss):
    """Under a stale sampler; one under which ratios are 1 is the special case in which they are told from nothing."""
    instance = drawn(environment)
    for sampler in ("current", "stale") if loss is ratio else ("stale",):
        expected, second, _, _ = plain(loss, instance, sampler)
        moments = exact(bind(loss), instance, sampler)
        agrees(moments, expected, second)
    assert moments.rollouts == len(instance.paths)
    assert moments.reduction == ("mean" if loss is scalar else "per-row")


# The sampler enters by the weights of rollouts and by its log-probs, which "current" has as a special case.
# Every loss where prompts and lengths differ, two in environments that differ in how prefixes meet.
LARGE = [ragged(4, 4, prompts=np.array([0.5, 0.5]))]
MEETING = [
    mdp(6, 3, 3, branches=3),
    ngram(4, 4, 2),
    ngram(3, 5, 4),
    ngram(3, 7, 2, end_token=0),
    mdp(40, 2, 4, branches=2),
]


@pytest.mark.parametrize(
    ("environment", "loss", "sampler"),
    spread(
        2,
        [
            *((environment, loss, "stale") for environment in LARGE for loss in LOSSES),
            *((environment, full_and_sampled, "stale") for environment in MEETING),
            *((environment, k3, "current") for environment in (*LARGE, MEETING[0], MEETING[3])),
        ],
    ),
    ids=lambda value: f"{value.name}{value.n_contexts}" if hasattr(value, "n_contexts") else None,
)
def test_chunks_equal_single_rollouts(environment, loss, sampler, monkeypatch):
    """Where rollouts are many they are called in batches; the same as one by one, however they are cut."""
    instance = drawn(environment)
    assert len(instance.paths) > 200
    monkeypatch.setattr(enumeration, "ONE_BY_ONE", 10**9)
    one_by_one = enumeration.exact(bind(loss), instance, sampler)
    monkeypatch.setattr(enumeration, "ONE_BY_ONE", 0)
    monkeypatch.setattr(enumeration, "MOST_SINGLES", 0)  # calls of single rollouts must not be needed
    monkeypatch.setattr(enumeration, "by_tokens", lambda *_: None)  # nor are those of tokens what is tested here
    for chunk in (97, 2**18):
        monkeypatch.setattr(enumeration, "CHUNK", chunk * (environment.vocabulary if "logits" in loss.__name__ else 1))
        chunked = enumeration.exact(bind(loss), instance, sampler)
        agrees(chunked, one_by_one.gradient, one_by_one.second_moment)
        assert chunked.reduction == one_by_one.reduction
        for what in ("value", "metric"):
            mine, theirs = getattr(chunked, what), getattr(one_by_one, what)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert abs(mine.mean - theirs.mean) < EXACT
                assert abs(mine.std - theirs.std) < EXACT


def test_padding_never_reaches_the_gradient():
    """A loss that reads padded positions without a mask still has a gradient at live tokens only."""
    instance = drawn("ragged")

    def leaks(logp):
        return logp.sum(dim=1) ** 2

    expected, second, _, _ = plain(leaks, instance, padding=3)
    agrees(exact(bind(leaks), instance, padding=3), expected, second)
    assert np.abs(exact(bind(leaks), instance, padding=4).gradient - expected).max() > 1e-3


def test_reported_values_and_metrics():
    instance = drawn("ragged")
    u = np.where(instance.paths.mask, instance.paths.chosen(instance.policy - instance.reference), 0.0)
    weights = instance.rollout_weights("current")

    def loss(logp, ref_logp, mask):
        u = logp - ref_logp
        return u**2, {"kl": (u * mask).sum(dim=1).mean()}

    moments = exact(bind(loss), instance)
    assert moments.value.mean == pytest.approx(weights @ (u**2).sum(axis=1), rel=EXACT)
    kl = weights @ u.sum(axis=1)
    assert moments.metric.mean == pytest.approx(kl, rel=EXACT)
    assert moments.metric.std == pytest.approx(np.sqrt(weights @ (u.sum(axis=1) - kl) ** 2), rel=EXACT)


def test_a_loss_that_does_not_reach_the_policy_says_so():
    moments = exact(bind(lambda logp, ref_logp: (ref_logp * 2).sum(dim=1)), drawn("sequence"))
    assert not moments.leaves
    assert moments.second_moment == 0
    assert not moments.gradient.any()


def test_a_derivative_without_a_value_is_an_error_that_names_the_token():
    instance = drawn("sequence")
    with pytest.raises(TargetError, match=r"not finite at token 0 .* \[.*\]"):
        exact(bind(lambda logp: (logp - logp.detach()).abs().sqrt()), instance)


def test_single_precision_is_seen_and_tolerated():
    moments = exact(bind(lambda logp, ref_logp: k3(logp.float(), ref_logp.float())), drawn("sequence"))
    assert (moments.dtype, moments.reduction) == ("float32", "per-row")


def test_memory_stays_within_six_times_the_fields():
    instance = Instance.draw(sequence(6, 6), 0)
    loss = bind(k3)
    exact(loss, instance)
    fields = 3 * instance.paths.tokens.nbytes
    del instance.paths.__dict__["tokens"]
    tracemalloc.start()
    exact(loss, instance)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # What torch allocates is not traced; its chunks are bounded by CHUNK numbers a field.
    assert peak < 3 * fields
    assert "tokens" not in instance.paths.__dict__
    assert "contexts" not in instance.paths.__dict__


# How a loss combines rows.


def mean_of_rows(logp, ref_logp, mask):
    return (k3(logp, ref_logp) * mask).sum(dim=1).mean()


def sum_of_rows(logp, ref_logp, mask):
    return (k3(logp, ref_logp) * mask).sum()


def a_third_of_the_sum(logp, ref_logp, mask):
    return (k3(logp, ref_logp) * mask).sum() / 3


def coupled_when_two_rows_are_equal(logp, tokens, mask):
    live = tokens * mask - (1 - mask)
    equal = (live[:, None, :] == live[None, :, :]).all(dim=-1).sum(dim=1) > 1
    return (logp * mask).sum(dim=1) * torch.where(equal, 1.01, 1.0)


def coupled_when_lengths_differ(logp, mask):
    differ = mask.sum(dim=1).max() != mask.sum(dim=1).min()
    return (logp * mask).sum(dim=1) * (1.01 if differ else 1.0)


def coupled_when_prompts_differ(logp, mask, group):
    return (logp * mask).sum(dim=1) * (1.01 if len(set(group.tolist())) > 1 else 1.0)


def batch_norm(logp, mask):
    rows = (logp * mask).sum(dim=1)
    return ((rows - rows.mean()) / (rows.std(unbiased=False) + 1)) ** 3


def token_mean(logp, ref_logp, mask):
    return (k3(logp, ref_logp) * mask).sum() / mask.sum()


def largest_of_the_batch(logp, mask):
    return (logp * mask).sum(dim=1).max()


def rows_that_couple_in_secret(logp, mask):
    rows = (logp * mask).sum(dim=1)
    return rows + 1e-5 * (rows * rows.roll(1)).detach() * rows


def nothing_but_rounding(logp, mask):
    """Its gradient is zero whatever the batch, but comes out as 1e-17, in another way for every size."""
    rows = (logp * mask).sum(dim=1)
    return (rows - rows.mean()) / (rows.std(unbiased=False) + 1)


def coupled_beyond_pairs(logp, mask):
    rows = (logp * mask).sum(dim=1)
    return rows * (1.1 if len(rows) > 2 else 1.0)


def in_blocks_of_two(logp, ref_logp, mask):
    rows = (k3(logp, ref_logp) * mask).sum(dim=1)
    return torch.stack([block.mean() for block in rows.split(2)]).mean()


def root_of_the_size(logp, mask):
    return (logp * mask).sum() / len(logp) ** 0.5


REDUCTIONS = {
    k3: "per-row",
    nothing_but_rounding: "per-row",
    mean_of_rows: "mean",
    sum_of_rows: "sum",
    a_third_of_the_sum: "sum",
    coupled_when_two_rows_are_equal: "coupled",
    coupled_when_lengths_differ: "coupled",
    coupled_when_prompts_differ: "coupled",
    batch_norm: "coupled",
    token_mean: "coupled",
    largest_of_the_batch: "coupled",
    rows_that_couple_in_secret: "coupled",
    coupled_beyond_pairs: "coupled",
    in_blocks_of_two: "coupled",
    root_of_the_size: "coupled",
}


@pytest.mark.parametrize(
    "environment",
    [ragged(3, 3, prompts=np.array([0.5, 0.5])), ragged(4, 4, prompts=np.array([0.5, 0.5]))],
    ids=["few rollouts", "many rollouts"],
)
@pytest.mark.parametrize(
    ("loss", "reduction"), spread(4, REDUCTIONS.items()), ids=lambda item: getattr(item, "__name__", item)
)
def test_the_reduction_is_found(loss, reduction, environment, monkeypatch):
    monkeypatch.setattr(enumeration, "ONE_BY_ONE", 200)
    instance = drawn(environment)
    for seed in range(2):
        moments = exact(bind(loss), instance, seed=seed)
        assert moments.reduction == reduction
        assert bool(moments.coupling) == (reduction == "coupled")
    if len(instance.paths) < 100:
        expected, second, _, _ = plain(loss, instance)
        agrees(moments, expected, second)


def test_a_mean_that_becomes_a_sum_in_large_batches_is_called_one_by_one():
    def from_a_hundred_on(logp, ref_logp):
        rows = ((logp - ref_logp) ** 2).sum(dim=1)
        return rows.sum() if len(rows) >= 100 else rows.mean()

    instance = drawn(sequence(4, 5))
    assert len(instance.paths) == 1024
    moments = exact(bind(from_a_hundred_on), instance)
    alone = exact(bind(lambda logp, ref_logp: ((logp - ref_logp) ** 2).sum(dim=1)), instance)
    assert moments.reduction == "coupled"
    agrees(moments, alone.gradient, alone.second_moment)


def square(logp, ref_logp, mask):
    return ((logp - ref_logp).square() * mask).sum(-1)


def summed(logp, ref_logp, mask):
    return square(logp, ref_logp, mask).sum()


def of_logits(logits, ref_logits, mask):
    return ((logits.exp() * (logits - ref_logits)).sum(-1) * mask).sum(-1)


@pytest.mark.parametrize("sampler", ["current", "stale"])
@pytest.mark.parametrize(
    ("loss", "placement"), [(square, "loss"), (square, "both"), (summed, "loss"), (of_logits, "loss")]
)
def test_what_is_known_of_another_instance_saves_calls_and_changes_nothing(loss, placement, sampler):
    calls = []

    @functools.wraps(loss)
    def counted(*args, **kwargs):
        calls.append(1)
        return loss(*args, **kwargs)

    instance, bound = drawn("ragged"), bind(counted, Call(placement=placement))
    full = exact(bound, instance, sampler)
    before = len(calls)
    again = exact(bound, instance, sampler, known=full.reduction)
    assert again.reduction == full.reduction
    agrees(again, full.gradient, full.second_moment)
    assert (again.value is None) == (full.value is None)
    if full.value is not None:
        assert abs(again.value.mean - full.value.mean) < EXACT
        assert np.abs(again.value.rows - full.value.rows).max() < EXACT
    assert len(calls) - before <= 6


def first_row_dropped(logp, ref_logp, mask):
    rows = square(logp, ref_logp, mask)
    return torch.cat([rows[:1] * (len(rows) == 1), rows[1:]]).mean()


def from_eight_rows_on(logp, ref_logp, mask):
    rows = square(logp, ref_logp, mask)
    return (rows * (1 + (len(rows) >= 8))).mean()


def by_the_largest(logp, ref_logp, mask):
    rows = square(logp, ref_logp, mask)
    return rows / rows.detach().max()


def value_of_the_batch(logp, ref_logp, mask):
    rows = square(logp, ref_logp, mask)
    return rows - rows.detach().mean()


@pytest.mark.parametrize("loss", [first_row_dropped, from_eight_rows_on, by_the_largest, value_of_the_batch, summed])
def test_what_is_not_as_it_is_known_is_found_and_called_alone(loss):
    """The rows of another instance were a mean of rows apart; here they are not, or their values are not."""
    instance, bound = drawn("ragged"), bind(loss)
    full, again = exact(bound, instance), exact(bound, instance, known="mean")
    assert again.reduction == full.reduction
    assert np.array_equal(again.gradient, full.gradient)
    assert again.second_moment == full.second_moment
    for what in ("value", "metric"):
        mine, theirs = getattr(again, what), getattr(full, what)
        assert (mine is None) == (theirs is None)
        assert mine is None or np.array_equal(mine.rows, theirs.rows)


def test_a_sum_whose_probes_are_all_zero_is_not_taken_for_a_mean():
    """Only one rollout in a thousand has a gradient: what the probes see is zero whichever way rows are combined."""
    instance = drawn(sequence(6, 4))

    def rare(logp, tokens):
        chosen = (tokens == 5).all(dim=1)
        return torch.where(chosen, logp.sum(dim=1), 0.0).sum()

    last = instance.rollout_weights("current")[-1]
    moments = exact(bind(rare), instance)
    row = len(instance.paths) - 1
    assert moments.reduction == "sum"
    assert np.abs(moments.gradient - last * plain_batch(rare, instance, [row])).max() < EXACT * last


def test_too_many_rollouts_of_a_coupled_loss_are_refused_with_their_number():
    with pytest.raises(UsageError, match=r"32768 .*at most"):
        exact(bind(batch_norm), Instance.draw(sequence(8, 5), 0))


def test_a_loss_that_needs_groups_is_told_from_one_that_fails():
    def grouped(logp, mask, size):
        groups = (logp * mask).sum(dim=1).view(-1, size)
        return ((groups - groups.mean(dim=1, keepdim=True)) ** 2).sum()

    for size in (2, 4, 8):
        with pytest.raises(BatchOfOneError, match=f"runs on {size}"):
            exact(bind(grouped, Call(arguments={"size": size})), drawn("sequence"))
    with pytest.raises(TargetError) as caught:
        exact(bind(lambda logp: logp.view(-1, 0)), drawn("sequence"))
    assert not isinstance(caught.value, BatchOfOneError)


# Batches.


def in_order(logp, mask):
    rows = (logp * mask).sum(dim=1)
    return (rows * rows.roll(1).detach() * torch.arange(1, len(rows) + 1)).sum()


@pytest.mark.parametrize("loss", spread(1, [token_mean, batch_norm, in_order, full, full_and_sampled]))
@pytest.mark.parametrize(
    "environment",
    [ragged(2, 2, prompts=np.array([0.4, 0.6])), ngram(2, 2, 1), bandit(3)],
    ids=lambda environment: environment.name,
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_equal_every_ordered_tuple(environment, loss, size):
    instance = drawn(environment)
    for grouped in (False, True):
        expected, second = moments_by_hand(loss, instance, size, "stale", every_group if grouped else every_batch)
        moments = exact_batches(bind(loss), instance, "stale", size, grouped=grouped)
        # The cube of a pair's deviations has gradient 0, of which rounding leaves 1e-17.
        assert np.abs(moments.gradient - expected).max() <= EXACT * np.sqrt(second) + 1e-16
        assert abs(moments.second_moment - second) <= EXACT * second + 1e-31
        assert moments.batch == size


def test_the_advantage_in_a_batch_is_centred_on_the_rows_of_its_prompt():
    instance = drawn(bandit(3, prompts=np.array([0.5, 0.5])))
    paths, weights = instance.paths, instance.rollout_weights("current")
    reward = instance.environment.returns(paths)
    expected = np.zeros(instance.policy.shape)
    for i, j in itertools.product(range(6), repeat=2):
        centre = (reward[i] + reward[j]) / 2 if paths.prompt[i] == paths.prompt[j] else reward[i]
        score = np.zeros(instance.policy.shape)
        context = paths.contexts[i, 0]
        score[context] = -np.exp(instance.policy[context])
        score[context, paths.tokens[i, 0]] += 1
        expected += weights[i] * weights[j] * (reward[i] - centre) * score
    moments = exact_batches(bind(lambda logp, advantage: logp[:, 0] * advantage), instance, size=2)
    assert np.abs(moments.gradient - expected).max() < EXACT


def test_too_many_batches_are_refused_with_their_number():
    with pytest.raises(UsageError, match=r"27405 batches of 4 rollouts and at most 100"):
        exact_batches(bind(token_mean), drawn("sequence"), size=4, most=100)
    with pytest.raises(UsageError, match=r"729 batches of 2 rollouts in their order"):
        exact_batches(bind(in_order), drawn("sequence"), size=2, most=100)
    with pytest.raises(UsageError, match="at least one"):
        exact_batches(bind(k3), drawn("sequence"), size=0)


def test_rows_that_touch_only_others_of_their_own_prompt_are_found_among_many_prompts():
    """Two rollouts of one of forty prompts hardly ever meet by chance; a pair of them is tried on purpose."""
    instance = Instance.draw(bandit(3, prompts=np.full(40, 1 / 40)), 0)

    def crowded(logp, ref_logp, group, tokens):
        same = (group[:, None] == group) & (tokens != tokens.T)
        return ((logp - ref_logp).sum(-1) ** 2 * (1 + same.sum(dim=1))).mean()

    for seed in range(5):
        assert probe(bind(crowded), Rollout.of(instance), np.random.default_rng(seed)).reduction == "coupled"


def test_two_rollouts_of_one_prompt_are_among_the_few_whose_batches_are_tried():
    """Two at random of six are two different ones five times out of six, at the first and at the last prompt."""
    paths, found = Instance.draw(bandit(6, prompts=np.full(40, 1 / 40)), 0).paths, []
    for seed in range(40):
        prompts = paths.prompt[enumeration._pool(paths, np.random.default_rng(seed))]
        found.append(min((prompts == 0).sum(), (prompts == 39).sum()) > 1)
    assert np.mean(found) > 0.5


def test_a_loss_that_treats_two_rollouts_as_a_pair_is_found():
    """One rollout, the same one twice and larger batches are averaged: only two different ones show it."""

    def of_pairs(logp, ref_logp):
        rows = ((logp - ref_logp) ** 2).sum(dim=1)
        return rows.mean() if len(rows) != 2 or torch.equal(logp[0], logp[1]) else (rows[0] - rows[1]) ** 2

    base = Rollout.of(Instance.draw(bandit(8), 0))
    assert probe(bind(of_pairs), base, np.random.default_rng(0)).reduction == "coupled"


def test_rounding_makes_no_negative_variance():
    found = exact(bind(k3), drawn("bandit"))
    square = float((found.gradient**2).sum())
    assert replace(found, second_moment=np.nextafter(square, 0.0)).variance == 0.0


def test_what_other_leaves_held_is_there_again_after_a_backward_pass_through_a_checkpoint():
    """torch goes backward there to all leaves at once, and adds to what they hold."""
    x, weight = (torch.full((2,), 3.0, requires_grad=True) for _ in range(2))
    weight.grad = torch.full((2,), 7.0)
    (found,) = gradients_at((weight * checkpoint(torch.square, x * x, use_reentrant=True)).sum(), [x])
    assert found.tolist() == [3 * 4 * 3.0**3] * 2
    assert weight.grad.tolist() == [7.0] * 2
    assert x.grad is None
