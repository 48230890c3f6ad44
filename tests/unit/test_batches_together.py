"""Batches in one call, as rows or by torch.vmap: the same moments as from a call each, and none taken for granted."""

import numpy as np
import pytest
import torch
from cases.parts import k2
from weekly import first

from kltest.environments import Instance, ragged
from kltest.errors import TargetError
from kltest.estimators import find
from kltest.estimators.groups import group_sum
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.moments import caller, exact, exact_batches, exact_batches_each
from kltest.moments.mapped import mapped
from kltest.rollout import Rollout

# The same terms of size one in another order.
EXACT = 1e-12
NEVER = 10**9


def per_token(logp, ref_logp, mask):
    return ((logp - ref_logp).where(mask != 0, 0.0).square() / 2).sum()


def token_mean(logp, ref_logp, mask):
    return per_token(logp, ref_logp, mask) / mask.sum(), {"kl": (logp - ref_logp)[mask != 0].detach().mean()}


def longest(logp, ref_logp, mask):
    return per_token(logp, ref_logp, mask) / (len(mask) * mask.sum(1).max())


def by_advantage(logp, ref_logp, mask, advantage):
    return (per_token(logp, ref_logp, mask) + (advantage[:, None] * logp * mask).sum()) / mask.sum()


def less_the_mean(logp, ref_logp, mask):
    cost = ((logp - ref_logp) * mask).sum(1).detach()
    return ((cost - cost.mean()) * (logp * mask).sum(1)).sum() / mask.sum()


def only_in_large_calls(logp, ref_logp, mask):
    return token_mean(logp, ref_logp, mask)[0] * (1.001 if len(mask) > 30 else 1.0)


def only_the_first_row(logp, ref_logp, mask):
    """Counts the first row of a call of several batches, and no other, a little more."""
    more = torch.ones(len(mask), 1, dtype=logp.dtype)
    more[0] = 1.001 if len(mask) > 4 else 1.0
    return token_mean(logp * more + (logp * (1 - more)).detach(), ref_logp, mask)[0]


def only_at_full_length(logp, ref_logp, mask):
    full = bool((mask != 0).all())
    return less_the_mean(logp, ref_logp, mask) if full else token_mean(logp, ref_logp, mask)[0]


def only_of_copies(logp, ref_logp, mask, tokens, advantage):
    """Pulls at a batch of copies of one rollout, where no other rollout has an advantage."""
    alike = (tokens.where(mask != 0, -1) == tokens.where(mask != 0, -1)[:1]).all()
    return (advantage[:, None] * logp * mask).sum() / mask.sum() + alike * token_mean(logp, ref_logp, mask)[0]


def only_tied(logp, ref_logp, mask, reward):
    """Gives nothing for a batch of equal rewards."""
    return token_mean(logp, ref_logp, mask)[0] * (0.0 if (reward == reward[0]).all() else 1.0)


def of_distinct_rollouts(logp, ref_logp, mask, tokens):
    return per_token(logp, ref_logp, mask) / len(tokens.where(mask != 0, -1).unique(dim=0)) / mask.sum(1).mean()


def root_of_the_total(logp, ref_logp, mask):
    return per_token(logp, ref_logp, mask) / mask.sum().sqrt()


def in_small_calls(logp, ref_logp, mask):
    if len(mask) > 8:
        raise ValueError("eight rollouts at most")
    return token_mean(logp, ref_logp, mask)[0]


def hinged(logp, ref_logp, mask):
    """Is silent where the mean of a call is below a bound: batches below it are, in a call of others above, not."""
    cost = per_token(logp, ref_logp, mask) / mask.sum()
    return torch.relu(cost - 0.01)


def mixed_only_in_large_calls(logp, ref_logp, mask, group):
    """Tells groups apart until there are many of them."""
    return find("group-mean").function(logp, ref_logp, mask, group) * (1.001 if len(group.unique()) > 20 else 1.0)


def masked_by_advantage(logp, ref_logp, mask, advantage):
    return k2(logp, ref_logp, mask) * (advantage.abs() > 1e-9)


def whitened(logp, ref_logp, mask, reward):
    """Rewards less their mean over their deviation in the batch, whatever the group."""
    advantage = (reward - reward.mean()) / (reward.var(correction=0) + 1e-8).sqrt()
    return (advantage[:, None] * logp * mask).sum() / mask.sum(), {"kl": ((logp - ref_logp) * mask).detach().sum(1)}


def of_the_first_group(logp, ref_logp, mask, group):
    """Reads numbers of the group, which all batches of one prompt share."""
    cost = per_token(logp, ref_logp, mask)
    return cost.square() / (1 + int((group == group[0]).sum()))


def more_inside_vmap(logp, ref_logp, mask, reward):
    """Is another loss where its tensors do not say that they require a gradient, as inside torch.vmap."""
    return whitened(logp, ref_logp, mask, reward)[0] * (1.0 if logp.requires_grad else 1.001)


def cut_inside_vmap(logp, ref_logp, mask, reward):
    return whitened(logp if logp.requires_grad else logp.detach(), ref_logp, mask, reward)[0]


def logged_inside_vmap(logp, ref_logp, mask, reward):
    loss, metrics = whitened(logp, ref_logp, mask, reward)
    return loss, {"kl": metrics["kl"] + (0.0 if logp.requires_grad else 1e-3)}


MAPPED = [less_the_mean, root_of_the_total, whitened, of_the_first_group]
TOGETHER = [token_mean, longest, by_advantage]
OF_GROUPS = [find(name).function for name in ("group-mean", "leave-one-out", "tied-groups-masked")]
TOUCHING = [
    *OF_GROUPS,
    mixed_only_in_large_calls,
    masked_by_advantage,
    less_the_mean,
    only_in_large_calls,
    only_the_first_row,
    only_at_full_length,
    only_of_copies,
    only_tied,
    of_distinct_rollouts,
    root_of_the_total,
    in_small_calls,
    hinged,
    whitened,
    of_the_first_group,
    more_inside_vmap,
    cut_inside_vmap,
    logged_inside_vmap,
]


@pytest.mark.parametrize("grouped", first(1, [True, False]), ids=["groups", "rows"])
@pytest.mark.parametrize("function", [*TOGETHER, *TOUCHING], ids=lambda function: function.__name__)
def test_batches_in_one_call_are_what_they_are_in_a_call_each(function, grouped, monkeypatch):
    # The second of two instances: that rows may be in any order is known from the first, how calls combine is not.
    instance, size = instances("ragged", 0, 3)[1], 3
    loss, apart = bind(function), bind(function)
    found = exact_batches(loss, instance, "stale", size, grouped=grouped)
    monkeypatch.setattr(caller, "FEW", NEVER)
    monkeypatch.setattr(caller.Caller, "try_together", lambda *_: None)
    plain = exact_batches(apart, instance, "stale", size, grouped=grouped)
    assert np.abs(found.gradient - plain.gradient).max() < EXACT
    assert found.second_moment == pytest.approx(plain.second_moment, rel=EXACT)
    if function in (token_mean, whitened, logged_inside_vmap):
        assert found.metric.mean == pytest.approx(plain.metric.mean, rel=EXACT)
        assert found.metric.std == pytest.approx(plain.metric.std, rel=EXACT)
    if function in TOGETHER[1:] or (grouped and function in OF_GROUPS):
        assert 2 * loss.calls.count < apart.calls.count
    if function in MAPPED and (grouped or function is not of_the_first_group):
        assert 3 * loss.calls.count < apart.calls.count
    if function.__name__.endswith("inside_vmap"):
        assert loss.calls.count >= apart.calls.count


@pytest.mark.parametrize("grouped", first(1, [True, False]), ids=["groups", "rows"])
@pytest.mark.parametrize("function", first(3, [*TOGETHER, *TOUCHING]), ids=lambda function: function.__name__)
def test_instances_share_calls_and_keep_their_moments(function, grouped):
    """Each has the moments that it has by itself; also if how batches combine is known and calls are compared once."""
    drawn, size = instances("ragged", 0, 3), 3
    options = {"grouped": grouped, "logs": False}
    plain = [exact_batches(bind(function), instance, "stale", size, **options) for instance in drawn]
    loss = bind(function)
    once = exact_batches_each(loss, drawn, "stale", size, **options)
    before, again = loss.calls.count, exact_batches_each(loss, drawn, "stale", size, known=once[0].combining, **options)
    for one, other in zip([*plain, *plain], [*once, *again], strict=True):
        assert np.abs(one.gradient - other.gradient).max() < EXACT
        assert one.second_moment == pytest.approx(other.second_moment, rel=EXACT)
    if once[0].combining.together == "any":
        assert 2 * (loss.calls.count - before) < before


def mean_of_the_group(logp, ref_logp, mask, group):
    """Couples the rows of a group, and leaves a row that is alone in it a gradient."""
    rows = group_sum(torch.ones_like(logp[:, 0]), group)
    cost = k2(logp, ref_logp, mask)
    return cost * group_sum(cost.detach(), group) / rows


def mean_of_the_batch(logp, ref_logp, mask, group):
    """Reads the group, and couples all rows."""
    cost = k2(logp, ref_logp, mask)
    return cost * cost.detach().mean() + 0 * group


def mean_of_numbers(logp, ref_logp, mask, group):
    """Couples all rows by a number that torch.vmap cannot give."""
    cost = k2(logp, ref_logp, mask)
    return cost * cost.detach().mean().item() + 0 * group


@pytest.mark.parametrize(
    ("function", "one_call"), [(mean_of_the_group, True), (mean_of_the_batch, True), (mean_of_numbers, False)]
)
def test_rows_of_coupled_groups_are_called_together_as_groups_of_one(function, one_call):
    instance = instances("ragged", 0)[0]
    first, further = bind(function), bind(function)
    known, found = exact(first, instance), exact(further, instance, known="coupled")
    apart = [first(Rollout.of(instance).take([row])).rows for row in range(len(instance.paths))]
    assert known.reduction == found.reduction == "coupled"
    assert found.value.rows == pytest.approx(np.array([float(row.detach()) for row in apart]), rel=EXACT)
    assert np.abs(known.gradient - found.gradient).max() < EXACT
    assert (further.calls.count < len(instance.paths)) == one_call


class Remembers:
    """Couples rows by their mean, and keeps the mean of its latest call."""

    def __init__(self):
        self.mean = torch.zeros((), dtype=torch.float64)

    def __call__(self, logp, ref_logp, mask):
        cost = k2(logp, ref_logp, mask)
        self.mean = cost.detach().mean()
        return cost * self.mean


def noisy_mean(logp, ref_logp, mask):
    """Draws a number a call that torch.vmap knows nothing of."""
    return less_the_mean(logp, ref_logp, mask) * np.random.uniform()  # noqa: NPY002


@pytest.mark.parametrize(
    ("function", "words"), [(Remembers(), "keeps something"), (noisy_mean, "random"), (mean_of_numbers, "vmap")]
)
def test_what_many_batches_would_share_is_not_called_with_many_batches_at_once(function, words):
    loss, rollout = bind(function), Rollout.of(instances("ragged", 0)[0])
    single = float(loss(rollout.take([0, 5])).objective.detach())
    draws = loss.calls.draws()
    with pytest.raises(TargetError, match=words):
        mapped(loss, 2, ["logp", "ref_logp", "mask", "group"])(rollout.take([0, 5, 1, 4]))
    assert not draws.changed()
    assert function is noisy_mean or float(loss(rollout.take([0, 5])).objective) == single


def test_nothing_of_many_batches_is_left_where_a_loss_keeps_its_first_call():
    class First(Remembers):
        def __call__(self, logp, ref_logp, mask):
            before = self.mean
            loss = super().__call__(logp, ref_logp, mask)
            self.mean = before if len(mask) != 2 else self.mean
            return loss

    loss, rollout = bind(first := First()), Rollout.of(instances("ragged", 0)[0])
    loss(rollout)
    found = mapped(loss, 2, ["logp", "ref_logp", "mask"])(rollout.take([0, 5, 1, 4]))
    assert found.objective.isfinite()
    assert float(first.mean) == 0


def test_a_logged_number_is_taken_from_a_call_each_and_only_if_it_is_asked_for():
    """A batch's number is of its own rows: by hand, of every pair."""
    instance = Instance.draw(ragged(3, 2), 0)
    paths, weights = instance.paths, instance.rollout_weights("current")
    u = np.where(paths.mask, paths.chosen(instance.policy - instance.reference), 0.0).sum(1)
    pairs = np.outer(weights, weights)
    lengths = paths.lengths[:, None] + paths.lengths
    assert exact_batches(bind(token_mean), instance, size=2).metric.mean == pytest.approx(
        (pairs * (u[:, None] + u) / lengths).sum(), rel=EXACT
    )
    assert exact_batches(bind(token_mean), instance, size=2, logs=False).metric is None


def logs(of):
    def loss(logp, ref_logp, mask):
        u = (logp - ref_logp).where(mask != 0, 0.0)
        return (u.square() / 2).sum(1).mean(), {"kl": of(u.detach().sum(1))}

    return loss


@pytest.mark.parametrize(
    ("of", "calls"),
    [(torch.mean, 21), (torch.max, 21), (lambda u: u, 6), (lambda u: u - u.mean(), 15)],
    ids=["one number", "the largest", "by row", "by row, coupled"],
)
def test_what_is_logged_in_a_further_instance_is_what_each_rollout_logs_alone(of, calls):
    """Fifteen rollouts: six calls tell the gradients; a number of all of a call is asked of each, without them."""
    instance = instances("ragged", 0)[1]
    loss, plain = bind(logs(of)), exact(bind(logs(of)), instance)
    found = exact(loss, instance, known="mean")
    assert found.metric.rows == pytest.approx(plain.metric.rows, rel=EXACT)
    assert np.abs(found.gradient - plain.gradient).max() < EXACT
    assert found.second_moment == pytest.approx(plain.second_moment, rel=EXACT)
    assert loss.calls.count >= calls
    assert (loss.calls.count == calls) == (calls != 15)
