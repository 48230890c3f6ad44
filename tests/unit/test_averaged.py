"""A loss without its noise: copies of a batch in one call, each with random numbers of its own."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kltest
from kltest.environments import Instance, ragged
from kltest.errors import TargetError
from kltest.identify.measure import Measure
from kltest.loss.calling import bind
from kltest.moments import exact
from kltest.moments.averaged import averaged, side_by_side
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout
from kltest.samples.drawing import Drawing, Draws

INSTANCE = Instance.draw(ragged(3, 3), 0)


def batch():
    return Rollout.of(INSTANCE, sampler="stale")


def squares(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1) ** 2 / 2


def plain(logp, ref_logp, mask):
    return squares(logp, ref_logp, mask).mean()


def by_row(logp, ref_logp, mask):
    return (squares(logp, ref_logp, mask) * (torch.rand(len(logp)) < 0.5) * 2).mean()


def added_up(logp, ref_logp, mask):
    return F.dropout(squares(logp, ref_logp, mask), 0.2).sum()


def of_numpy(logp, ref_logp, mask):
    kept = torch.from_numpy(np.random.rand(len(logp)) < 0.5)  # noqa: NPY002
    return (squares(logp, ref_logp, mask) * kept * 2).mean()


def per_tokens_of_the_batch(logp, ref_logp, mask):
    return (squares(logp, ref_logp, mask) * (torch.rand(len(logp)) < 0.5) * 2).sum() / mask.sum()


def quiet_per_tokens_of_the_batch(logp, ref_logp, mask):
    return squares(logp, ref_logp, mask).sum() / mask.sum()


PAIRS = {by_row: plain, added_up: plain, of_numpy: plain, per_tokens_of_the_batch: quiet_per_tokens_of_the_batch}


@pytest.mark.parametrize(("noisy", "quiet"), PAIRS.items(), ids=lambda one: one.__name__)
def test_the_mean_is_the_gradient_without_noise(noisy, quiet):
    """Of every row, whether the loss averages, adds up or counts the tokens of the batch."""
    one, other, sums = batch(), batch(), noisy is added_up
    loss, *_ = averaged(bind(noisy), batch(), adds_up=sums)
    found = leaf_gradients(loss, loss(one).objective, one)["logp"]
    plainly = bind(quiet)
    wanted = leaf_gradients(plainly, plainly(other).objective, other)["logp"] * (len(other) if sums else 1)
    assert float((found - wanted).norm()) < 0.04 * float(wanted.norm())


def test_its_expected_gradient_is_the_exact_one():
    loss, *_ = averaged(bind(by_row), batch(), adds_up=False)
    found, wanted = exact(loss, INSTANCE), exact(bind(plain), INSTANCE)
    assert found.dtype == "averaged"
    assert np.linalg.norm(found.gradient - wanted.gradient) < 0.06 * np.linalg.norm(wanted.gradient)


def scaled(logp, ref_logp, mask):
    return plain(logp, ref_logp, mask) * 2 * random.random()


def all_or_nothing(logp, ref_logp, mask):
    """Two seeds often decide alike, which looks as if there were no noise."""
    return plain(logp, ref_logp, mask) * 2 * (torch.rand(()) < 0.5)


def one_row_in_fifty_of_numpy(logp, ref_logp, mask):
    return (squares(logp, ref_logp, mask) * torch.from_numpy(np.random.rand(len(logp)) < 0.02) / 0.02).mean()  # noqa: NPY002


def one_row_in_fifty(logp, ref_logp, mask):
    return (squares(logp, ref_logp, mask) * (torch.rand(len(logp)) < 0.02) / 0.02).mean()


@pytest.mark.parametrize("loss", [scaled, all_or_nothing])
def test_a_number_that_all_copies_share_is_not_taken_away(loss):
    with pytest.raises(TargetError, match="that all rows of a batch share"):
        averaged(bind(loss), batch(), adds_up=False)


def test_noise_that_thousands_of_copies_leave_is_told():
    with pytest.raises(TargetError, match="of noise is left"):
        averaged(bind(one_row_in_fifty_of_numpy), batch(), adds_up=False)


def test_numbers_of_torch_take_fewer_copies():
    """One in fifty would take some 16,000 copies, of which 3 % of noise are left, if they were drawn each by itself."""
    loss, *_ = averaged(bind(one_row_in_fifty), batch(), adds_up=False)
    one, other, plainly = batch(), batch(), bind(plain)
    found = leaf_gradients(loss, loss(one).objective, one)["logp"]
    wanted = leaf_gradients(plainly, plainly(other).objective, other)["logp"]
    assert float((found - wanted).norm()) < 0.04 * float(wanted.norm())


def less_the_others(logp, ref_logp, mask):
    """Copies of a row would be among the others."""
    cost = ((logp - ref_logp) * mask).sum(-1).detach()
    cost = cost - (cost.sum() - cost) / max(1, len(cost) - 1)
    return (cost * (logp * mask).sum(-1) * (torch.rand(len(logp)) < 0.5) * 2).mean()


def test_copies_that_change_each_other_are_refused():
    with pytest.raises(TargetError, match="couples the rows"):
        averaged(bind(less_the_others), batch(), adds_up=False)


def wrong_sign(logp, ref_logp, mask):
    return -all_or_nothing(logp, ref_logp, mask)


def row_of(loss):
    loss = bind(loss)
    measure = Measure(loss, {"reverse_kl": 1.0}, frozenset({"logp", "ref_logp", "mask"}))
    (row,) = measure.rows("bandit", "current")
    return row, loss.calls.count


@pytest.mark.scheduled
@pytest.mark.parametrize("loss", [all_or_nothing, one_row_in_fifty_of_numpy])
def test_noise_that_is_not_averaged_is_left_open_after_few_batches(loss):
    row, calls = row_of(loss)
    assert row.agrees is None
    assert calls < 6000
    assert "share" in row.note or "of noise is left" in row.note


@pytest.mark.scheduled
def test_few_batches_still_refute():
    assert row_of(wrong_sign)[0].agrees is False


def test_a_mean_of_several_calls_is_that_of_one(monkeypatch):
    """As many copies, and a call takes some of them at a time."""
    found = []
    for at_once in (2**20, 2**12):
        monkeypatch.setattr("kltest.moments.averaged.AT_ONCE", at_once)
        one = batch()
        loss, *_ = averaged(bind(by_row), batch(), adds_up=False)
        found.append(leaf_gradients(loss, loss(one).objective, one)["logp"])
    assert float((found[0] - found[1]).norm()) < 0.06 * float(found[0].norm())


def test_copies_have_groups_of_their_own():
    rollout = batch().take([0, 1, 2]).replace(group=torch.tensor([0, 0, 1]))
    assert side_by_side(rollout, 3).peek("group").tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]


def of_groups(logp, ref_logp, mask, kl_coef=1.0, num_generations=4):
    """The penalty of a rollout less the mean of its group, in the score; half of the rollouts, drawn at random."""
    cost = ((logp - ref_logp) * mask).sum(-1)
    centred = cost.detach().view(-1, num_generations)
    centred = (centred - centred.mean(-1, keepdim=True)).view(-1)
    return kl_coef * (2 * (torch.rand(len(cost)) < 0.5) * centred * cost).mean()


def of_the_whole_call(logp, ref_logp, mask, kl_coef=1.0, num_generations=4):
    """The same less the mean of all groups of the call: called together they would change each other."""
    cost = ((logp - ref_logp) * mask).sum(-1)
    centred = cost.detach() - cost.detach().mean()
    if len(cost) % num_generations:
        raise ValueError("whole groups")
    return kl_coef * (2 * (torch.rand(len(cost)) < 0.5) * centred * cost).mean()


@pytest.mark.parametrize(("function", "together"), [(of_groups, "same"), (of_the_whole_call, "none")])
def test_groups_of_a_noisy_loss_are_called_together_if_they_are_apart_on_average(function, together):
    """And their gradients have the same mean as those of groups that are each called alone."""
    means = []
    for average in (True, False):
        loss = bind(function)
        drawing = Drawing(loss, INSTANCE, "current", 4, True, 0, np.random.default_rng(0))
        quiet = None
        if average:
            try:
                quiet, *_ = averaged(loss, drawing.rollout(drawing.paths(8)), adds_up=False)
            except TargetError:
                assert together == "none"
        draws = Draws(drawing, noisy=True, average=quiet)
        assert draws.caller.together == (together if quiet else "none")
        before = loss.calls.count
        gradients = draws.take(1000)[1]
        calls = loss.calls.count - before
        assert calls < 300 if quiet else calls >= 1000
        means.append((gradients.mean(axis=0), gradients.std(axis=0) / np.sqrt(len(gradients))))
    (one, error), (other, _) = means
    assert np.all(np.abs(one - other) < 6 * error + 1e-12)


def test_a_call_leaves_the_random_numbers_of_others_alone():
    loss, *_ = averaged(bind(by_row), batch(), adds_up=False)
    before = torch.get_rng_state()
    loss(batch())
    assert torch.equal(before, torch.get_rng_state())


def dropped_out_of_long_ones(logp, ref_logp, mask):
    """Tokens of long rollouts are dropped: unbiased, and random only where its gradient is not measured."""
    square = (logp - ref_logp).square().where(mask != 0, 0.0) / 2
    return (F.dropout(square, 0.5) if logp.shape[1] > 32 else square).sum(-1)


def one_of_two_losses(logp, ref_logp, logits, ref_logits, mask):
    """The squared log-ratio or the exact KL, by chance: which fields have a gradient is random."""
    if torch.rand(()) < 0.5:
        return (logp - ref_logp).square().where(mask != 0, 0.0).sum(-1) / 2
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logits.exp() * (logits - ref_logits)).sum(-1).where(mask != 0, 0.0).sum(-1)


def kept_by_length(logp, ref_logp, mask):
    """The same without the weight of those that are kept: half of the gradient, once batches are padded to 33."""
    square = (logp - ref_logp).square().where(mask != 0, 0.0) / 2
    return (F.dropout(square, 0.5) / 2 if logp.shape[1] > 32 else square).sum(-1)


def test_random_numbers_that_begin_farther_out_are_averaged():
    """One draw is not the expectation."""
    report = kltest.grade(dropped_out_of_long_ones, expect="local_reverse_kl")
    assert report.verdict == "confirmed"
    (found,) = [check for check in report.failed if check.code == "KL507"]
    assert "beyond: there its mean over many draws was compared" in found.message
    report = kltest.grade(kept_by_length, expect="local_reverse_kl")
    assert report.verdict == "refuted"
    assert "KL207" in [check.code for check in report.failed]


@pytest.mark.scheduled
def test_which_leaves_have_a_gradient_may_be_random():
    report = kltest.grade(one_of_two_losses, expect="local_reverse_kl", select="KL105", environment="bandit")
    assert report.verdict == "inconclusive"
    assert all(row.agrees for row in report.gradients)
    assert "draws a random number that all rows of a batch share" in report.checks[0].message
