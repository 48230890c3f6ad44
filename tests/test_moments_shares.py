"""Losses that say of themselves that they are costly: the same moments from fewer calls, and from all where need be."""

import inspect
import itertools

import numpy as np
import pytest
import torch

from kltest.environments import Instance, ragged
from kltest.identify.instances import with_ties
from kltest.loss.calling import bind
from kltest.moments import exact_batches
from kltest.moments.batches import _Batches
from kltest.rollout import Rollout


def token_mean(logp, ref_logp, mask):
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0)
    return u.square().sum() / 2 / live.sum(), {"kl": u.detach().sum() / live.sum()}


def with_a_small_constant(logp, ref_logp, mask):
    """The total stands in it otherwise than as a factor: no share is a ratio of lengths."""
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0)
    total = live.sum() + 0.01
    return u.square().sum() / 2 / total, {"kl": u.detach().sum() / total}


def root_of_the_total(logp, ref_logp, mask):
    u = (logp - ref_logp).where(mask != 0, 0.0)
    return u.exp().sum() / mask.sum().sqrt(), {"kl": (u.detach().sum(1) / mask.sum(1)).mean()}


def longest(logp, ref_logp, mask):
    """Depends on more than the total: every batch must be called."""
    u = (logp - ref_logp).where(mask != 0, 0.0)
    return u.square().sum() / mask.sum(1).max(), {"kl": u.detach().mean()}


def whitened(logp, ref_logp, mask):
    u = (logp - ref_logp).where(mask != 0, 0.0).sum(1)
    cost = (u.detach() - u.detach().mean()) / (u.detach().std() + 1e-3)
    return (cost * logp.where(mask != 0, 0.0).sum(1)).mean(), {"kl": u.detach().mean()}


def logs_a_maximum(logp, ref_logp, mask):
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0)
    return u.square().sum() / live.sum(), {"kl": u.detach().max()}


def leave_one_out(logp, ref_logp, mask, reward, group, beta):
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0).sum(1)
    cost = beta * u.detach() - reward
    same = (group[:, None] == group[None]).to(cost.dtype)
    others = (same @ cost - cost) / (same.sum(1) - 1)
    return ((cost - others) * logp.where(live, 0.0).sum(1)).mean(), {"kl": u.detach().mean()}


def logs_by_length(logp, ref_logp, mask, reward, group, beta):
    loss, _ = leave_one_out(logp, ref_logp, mask, reward, group, beta)
    live = mask != 0
    return loss, {"kl": (logp - ref_logp).detach().where(live, 0.0).sum() / live.sum()}


def masks_ties(logp, ref_logp, mask, reward, group, beta):
    """Groups whose rewards are equal are left out of the mean, so that groups in one call are not apart."""
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0).sum(1)
    same = (group[:, None] == group[None]).to(u.dtype)
    mean = same @ reward / same.sum(1)
    kept = (same @ (reward - mean).square() > 0).to(u.dtype)
    loss = ((beta * u.detach() - reward) * logp.where(live, 0.0).sum(1) * kept).sum() / kept.sum().clamp(min=1)
    return loss, {"kl": (u.detach() * kept).sum() / kept.sum().clamp(min=1)}


def hardly_ever(logp, ref_logp, mask, reward, group, beta):
    """Standardised pairs: most give nothing with or without the KL; a token mean, so that groups are not apart."""
    live = mask != 0
    u = (logp - ref_logp).where(live, 0.0).sum(1)
    cost = beta * u.detach() - reward
    same = (group[:, None] == group[None]).to(cost.dtype)
    away = cost - same @ cost / same.sum(1)
    return (away.sign() * (logp * live).sum(1)).sum() / live.sum(), {"kl": u.detach().mean()}


BATCHES = [token_mean, with_a_small_constant, root_of_the_total, longest, whitened, logs_a_maximum]
GROUPS = [leave_one_out, logs_by_length, masks_ties, hardly_ever]
SPARED = {token_mean, with_a_small_constant, root_of_the_total, leave_one_out, logs_by_length}


@pytest.fixture(scope="module")
def instance():
    return with_ties(Instance.draw(ragged(3, 3), 5), 5)


def moments(function, instance, *, costly, size=3):
    rows = []

    def counted(*given, **named):
        rows.append(1)
        return function(*given, **named)

    counted.__signature__ = inspect.signature(function)
    counted.costly = costly
    loss = bind(counted, name=function.__name__)
    assert loss.costly == costly
    return exact_batches(loss, instance, "stale", size, grouped=function in GROUPS), len(rows)


@pytest.mark.parametrize("function", [*BATCHES, *GROUPS], ids=lambda function: function.__name__)
def test_a_costly_loss_has_the_moments_of_one_that_is_not(function, instance):
    plain, many = moments(function, instance, costly=False)
    spared, few = moments(function, instance, costly=True)
    scale = np.abs(plain.gradient).max()
    # The same terms in another order.
    assert np.abs(spared.gradient - plain.gradient).max() < 1e-12 * scale
    assert spared.second_moment == pytest.approx(plain.second_moment, rel=1e-11)
    assert spared.metric.mean == pytest.approx(plain.metric.mean, rel=1e-11)
    assert spared.metric.std == pytest.approx(plain.metric.std, rel=1e-9)
    assert spared.added_up == plain.added_up
    assert (few < many / 2) == (function in SPARED), (few, many)


def test_groups_that_give_nothing_do_not_vouch_for_the_others(instance):
    """Half of the pairs give nothing: two that are drawn at random see in three cases of four that a share is wrong."""

    def quiet(*given, **named):
        return hardly_ever(*given, **named)[0]

    quiet.__signature__ = inspect.signature(hardly_ever)
    batches = _Batches(bind(quiet), Rollout.of(instance, sampler="stale"))
    pairs = np.array(list(itertools.combinations_with_replacement(range(len(instance.paths)), 2)))
    for seed in range(20):
        batches.apart = "mean"
        assert batches._together(pairs, np.random.default_rng(seed)) is None


def test_the_expectation_is_that_of_every_ordered_batch(instance):
    """By hand: token means of all pairs, one call each, chained to a table of logits by autograd."""
    found, _ = moments(token_mean, instance, costly=True, size=2)
    paths, weights = instance.paths, instance.rollout_weights("stale")
    table = torch.from_numpy(instance.policy).requires_grad_()
    log_probs, reference = table.log_softmax(1), torch.from_numpy(instance.reference)
    contexts, tokens = torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
    mask = torch.from_numpy(paths.mask)
    logp, ref = log_probs[contexts, tokens], reference[contexts, tokens]
    total = 0.0
    for pair in itertools.product(range(len(paths)), repeat=2):
        rows = list(pair)
        total = total + weights[rows].prod() * token_mean(logp[rows], ref[rows], mask[rows])[0]
    (expected,) = torch.autograd.grad(total, table)
    assert np.abs(found.gradient - expected.numpy()).max() < 1e-12


def test_a_kind_of_batches_that_is_otherwise_is_noticed(instance):
    """A batch of every choice of lengths is looked at, and here those with the shortest rollout give nothing."""

    def stops(logp, ref_logp, mask):
        u = (logp - ref_logp).where(mask != 0, 0.0)
        return u.square().sum() / mask.sum() * float(mask.sum(1).min() > 1), {"kl": u.detach().sum() / mask.sum()}

    plain, _ = moments(stops, instance, costly=False)
    spared, _ = moments(stops, instance, costly=True)
    assert np.abs(spared.gradient - plain.gradient).max() < 1e-12
