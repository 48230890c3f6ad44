"""Hygiene: padding, extreme log-ratios, inputs, repetition, precision; expected numbers are solved for here."""

import itertools
import math
import re
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases.parts import k2 as half_square
from cases.parts import total
from scipy.optimize import brentq
from weekly import first, spread

from kltest import grade
from kltest.checks.batches import companions
from kltest.environments import Instance, ragged
from kltest.errors import TargetError
from kltest.estimators import registry
from kltest.grading.grader import plan
from kltest.grading.options import Options
from kltest.loss.calling import bind
from kltest.moments import NonDeterministicError, exact
from kltest.rollout import Rollout


def failed(loss, **options):
    return {check.code for check in grade(loss, **options).failed if check.code < "KL8"}


def result(code, loss, **options):
    """Of one check; the results of checks do not depend on which others are selected."""
    return next(check for check in grade(loss, **{"select": code, **options}).checks if check.code == code)


@pytest.fixture
def batch():
    instance = Instance.draw(ragged(3, 3), 0)
    return Rollout.of(instance).take([0, 6, 13, 14])


@pytest.mark.parametrize("code", ["KL501", "KL502"])
def test_padding_is_skipped_with_a_reason_where_it_says_nothing(code):
    assert "caller" in result(code, lambda logp, ref_logp: (logp - ref_logp) ** 2).message
    assert "without padding" in result(code, half_square, environment="bandit,sequence").message


def test_a_mask_that_serves_something_else_leaves_padding_to_the_caller():
    def weighted(logp, ref_logp, mask):
        weight = torch.where(mask.bool(), logp, 0.0).sum(-1, keepdim=True).detach()
        return weight * (logp - ref_logp) ** 2

    assert not failed(weighted, select="KL501,KL502")

    def own_where_too_late(logp, ref_logp, mask):
        return torch.where(mask.bool(), (ref_logp - logp).exp() - 1, 0.0)

    assert failed(own_where_too_late, select="KL501,KL502") == {"KL502"}  # it takes numbers that are no log-probs


def prefix(u, mask):
    """As many tokens as are live, from the first on."""
    return u.where(torch.arange(u.shape[1]) < mask.sum(-1, keepdim=True), 0.0).sum(-1)


def up_to_the_last(u, mask):
    live = mask.flip(-1).cummax(-1).values.flip(-1)
    return u.where(live != 0, 0.0).sum(-1)


def slices(u, mask):
    return torch.stack([row[: int(length)].sum() for row, length in zip(u, mask.sum(-1), strict=True)])


def live(u, mask):
    return u.where(mask != 0, 0.0).sum(-1)


GAPS = [(prefix, True), (live, False), (up_to_the_last, True), (slices, True)]


@pytest.mark.parametrize(("summed", "wrong"), first(2, GAPS))
def test_a_mask_with_a_gap_that_is_read_wrongly_is_an_error_unless_it_says_which_tokens_exist(summed, wrong):
    report = grade(lambda logp, ref_logp, mask: summed(logp - ref_logp, mask).square() / 2, select="KL208")
    assert report.verdict == ("refuted" if wrong else "confirmed")
    assert report.reach.holes
    assert [check.code for check in report.errors] == ["KL208"] * wrong
    assert "masks with and without gaps" in " ".join(report.to_text(verbose=True).split())
    existing = grade(
        lambda logp, ref_logp, attention_mask: summed(logp - ref_logp, attention_mask) ** 2 / 2, select="KL208"
    )
    assert (existing.verdict, [check.code for check in existing.warnings]) == ("confirmed", ["KL208"] * wrong)


@pytest.mark.scheduled
def test_credit_that_ends_with_a_turn_is_seen_in_two_turns():
    report = grade(lambda logp, ref_logp, mask: prefix(logp - ref_logp, mask) ** 2 / 2, environment="turns")
    assert [(row.environment, row.agrees) for row in report.gradients] == [("turns", False)]
    assert grade(lambda logp, ref_logp, mask: live(logp - ref_logp, mask) ** 2 / 2, environment="turns").errors == []


def test_gaps_of_distributions_and_of_groups_are_tried_too():
    def exact(logits, ref_logits, mask):
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        return prefix((p.exp() * (p - q)).sum(-1), mask)

    def of_groups(logp, ref_logp, rewards, mask, beta):
        advantage = rewards - rewards.mean() - beta * (logp - ref_logp).detach().where(mask != 0, 0.0).sum(-1)
        return -(advantage * up_to_the_last(logp, mask)).mean()

    for loss, expect in ((exact, "local_reverse_kl"), (of_groups, "reverse_kl")):
        report = grade(loss, expect=expect, select="KL208")
        assert [check.code for check in report.errors] == ["KL208"]


def test_gaps_are_not_tried_without_a_mask():
    assert not grade(lambda logp, ref_logp: (logp - ref_logp) ** 2 / 2, expect="local_reverse_kl").reach.holes


def of_sums(function):
    return lambda logp, ref_logp, mask: function(total(logp - ref_logp, mask))


def of_tokens(function):
    return lambda logp, ref_logp: function(logp - ref_logp)


def in_the_gap(u):
    """Of a size between 8 and 16."""
    return (u.abs() < 8) | (u.abs() > 16)


def huber(logp, ref_logp, mask):
    live = [part.where(mask != 0, 0.0).sum(-1) for part in (logp, ref_logp)]
    return F.huber_loss(*live, delta=6.5)


# Where k3 = e^(−u) − 1 + u reaches 10; the clamp of u to ±20 lies outside of both.
LOW, HIGH = (brentq(lambda u: math.exp(-u) - 1 + u - 10, *bracket, xtol=1e-13) for bracket in ((-4, -1), (5, 20)))
LOCAL, REWARD, SUM = {"expect": "local_reverse_kl"}, {"placement": "reward"}, "summed over the sequence"
DEAD = [
    # A row of each kind: both sides, a warning, a gap, a value, a plateau, and right ones.
    ("k3-clamped", {}, "error", f"for u < −{-LOW:.3g} and for u > {HIGH:.3g}"),
    (
        of_sums(lambda u: (u.square() / 2).clamp(max=72.0)),
        {},
        "warning",
        f"{SUM}, the gradient is exactly zero for u < −12",
    ),
    (of_tokens(lambda u: u.square() / 2 * in_the_gap(u)), LOCAL, "warning", "for −16 < u < −8 and for 8 < u < 16"),
    (
        of_tokens(lambda u: u.clamp(-7, 9)),
        REWARD,
        "warning",
        "of a token, the value does not change for u < −7 and for u > 9",
    ),
    (huber, {}, "error", f"{SUM}, the gradient stays what it is at the bound for u < −6.5 and for u > 6.5"),
    (half_square, {}, "", ""),
    (of_tokens(torch.tanh), {}, "", ""),
    (of_sums(lambda u: u.abs() / 2), {"expect": "total_variation"}, "", ""),
    # Zeros that are no dead zone, and a gradient that stands still as declared.
    (of_tokens(lambda u: u), {}, "", ""),
    (of_tokens(lambda u: -F.logsigmoid(u)), {}, "", ""),
    (of_tokens(torch.square), REWARD, "", ""),
]


@pytest.mark.parametrize(("loss", "options", "level", "words"), first(5, DEAD))
def test_dead_zones_and_plateaus_are_found_with_their_ends(loss, options, level, words):
    found = result("KL504", loss, **options)
    assert (found.level if found.status == "fail" else "") == level, found.message
    assert words in found.message


@pytest.mark.scheduled
def test_another_gradient_far_away_is_told_with_its_log_ratios():
    def steeper(logp, ref_logp, mask):
        square = half_square(logp, ref_logp, mask)
        return torch.where(square > 18, square**2 / 18, square)

    report = grade(steeper)
    assert all(row.agrees for row in report.gradients)
    (check,) = (check for check in report.failed if check.code == "KL105")
    assert re.search(r"log-ratios .*, 1\d\.\d", check.message)


GUARDS = [lambda p: p + 1e-10, lambda p: p.clamp(min=1e-8), lambda p: p.clamp(min=1e-12)]


@pytest.mark.scheduled
@pytest.mark.parametrize("guard", GUARDS)
def test_a_logarithm_that_is_guarded_is_right(guard):
    def guarded(logits, ref_logits, mask):
        p, q = (guard(table.where((mask != 0)[..., None], 0.0).softmax(-1)) for table in (logits, ref_logits))
        return (p * (p.log() - q.log())).sum(-1).where(mask != 0, 0.0).sum(-1)

    failed = {check.code for check in grade(guarded, expect="local_reverse_kl").failed}
    assert failed <= {"KL508", "KL801", "KL802"}, "half precision is another matter"


def test_overflow_says_at_which_log_ratio():
    def k3(logp, ref_logp):
        return (ref_logp - logp).exp() - 1 + logp - ref_logp

    message = result("KL503", k3).message
    assert "u = −1000 the value is inf" in message
    assert "−100 " not in message, "e^100 is a number in float64"
    single = result("KL503", lambda logp, ref_logp: k3(logp.float(), ref_logp.float()))
    assert "u = −100 the value is inf" in single.message


def test_writes_are_found_bit_for_bit(batch):
    def loss(logp, ref_logp, mask, change):
        change(ref_logp)
        return half_square(logp, ref_logp, mask)

    before = batch.peek("ref_logp").clone()
    changes = {
        "nothing": lambda it: None,
        "the same again": lambda it: it.copy_(it.clone()),
        "and back": lambda it: it.neg_().neg_(),
        "a view": lambda it: it.view(-1)[1:2].zero_(),
        "data": lambda it: it.data.add_(1e-16 + 1),
        "the last bit": lambda it: it.data.copy_(torch.nextafter(it, it + 1)),
        "NaN": lambda it: it.data.fill_(math.nan),
    }
    for name, change in changes.items():
        bound = bind(lambda logp, ref_logp, mask, change=change: loss(logp, ref_logp, mask, change)).for_experiments()
        bound(batch)
        harmless = name in ("nothing", "the same again", "and back")
        assert set(bound.record.writes) == (set() if harmless else {"ref_logp"}), name
        assert torch.equal(batch.peek("ref_logp"), before), "what other calls are given is unharmed"


def test_a_tensor_that_backward_still_needs_is_said(batch):
    def loss(logp, ref_logp):
        square = logp.square()
        logp.add_(1)
        return square - ref_logp

    report = grade(loss)
    assert report.verdict == "error"
    assert "cannot go backward" in report.error


class Growing:
    weight = 1.0

    def __call__(self, logp, ref_logp, mask):
        self.weight *= 1.01
        return self.weight * half_square(logp, ref_logp, mask)


def test_state_is_told_from_random_numbers():
    calls, generator, torchs = itertools.count(), np.random.default_rng(0), torch.Generator()
    instance = Instance.draw(ragged(3, 3), 0)

    def counting(logp, ref_logp, mask):
        return next(calls) * half_square(logp, ref_logp, mask)

    def noisy(logp, ref_logp, mask):
        return torch.rand(()).double() * half_square(logp, ref_logp, mask)

    def numpys(logp, ref_logp, mask):
        return np.random.random() * half_square(logp, ref_logp, mask)  # noqa: NPY002

    def own(logp, ref_logp, mask):
        return (generator.random() + torch.rand((), generator=torchs)) * half_square(logp, ref_logp, mask)

    def clocked(logp, ref_logp, mask):
        return (1 + time.perf_counter_ns() % 97) * half_square(logp, ref_logp, mask)

    def seldom(logp, ref_logp, mask):
        return torch.where(torch.rand_like(logp) < 0.01, 0.0, logp - ref_logp).where(mask != 0, 0.0).sum(-1).square()

    known = {counting: "unknown", clocked: "unknown", noisy: "draws", numpys: "draws", own: "draws", seldom: "draws"}
    for loss, why in {**known, Growing(): "state"}.items():
        with pytest.raises(NonDeterministicError) as error:
            exact(bind(loss), instance)
        assert error.value.why == why, loss
    assert issubclass(NonDeterministicError, TargetError)


@pytest.mark.parametrize("name", spread(3, sorted(registry())))
def test_no_registered_estimator_is_accused_of_low_precision(name):
    assert result("KL508", name, environment="bandit", select="KL508").status == "pass"


def test_what_cannot_be_called_in_half_precision_is_no_failure():
    def decomposed(logp, ref_logp, mask):
        return half_square(logp, ref_logp, mask) * torch.linalg.det(torch.eye(2, dtype=logp.dtype))

    found = result("KL508", decomposed)
    assert found.status == "inconclusive"
    assert "could not be called" in found.message


def test_a_coefficient_that_goes_through_numpy_is_a_number_like_another():
    """Where a constant is let have a gradient, or comes in bfloat16, its array is that of its numbers."""

    def numpys(logp, ref_logp, mask):
        reference = torch.from_numpy(ref_logp.numpy()).to(logp.dtype)
        return half_square(logp, reference, mask)

    report = grade(numpys, environment="ragged")
    assert report.verdict == "confirmed"
    assert not [check.code for check in report.checks if check.status == "inconclusive"]


@pytest.mark.scheduled
def test_signs_that_turn_within_rounding_do_not_count_and_lost_digits_are_not():
    def variation(logits, ref_logits, mask, offset=0.0):
        both = [table.where((mask != 0)[..., None], 0.0).exp() + offset for table in (logits, ref_logits)]
        return (both[0] - both[1]).abs().sum(-1).where(mask != 0, 0.0).sum(-1) / 2

    for offset, status in ((0.0, "pass"), (64.0, "fail")):
        found = result("KL508", variation, expect="local_total_variation", arguments={"offset": offset})
        assert found.status == status, found.message


def noisy_in_large_batches(draw):
    def loss(logp, ref_logp, mask, reward, beta):
        noise = torch.as_tensor(draw(len(logp))) if len(logp) > 5 else 0.0
        score = torch.where(mask != 0, logp, 0.0).sum(-1)
        return beta * half_square(logp, ref_logp, mask) - (reward + noise) * score

    return loss


@pytest.mark.scheduled
@pytest.mark.parametrize("kind", ["numpy", "torch", "own"])
def test_noise_that_begins_late_cancels_in_the_kl_part_and_moves_nobodys_generator(kind):
    """Although NumPy's generator is saved only once a loss was seen to draw from it."""
    own = np.random.default_rng(0)
    draws = {"torch": torch.randn, "numpy": np.random.standard_normal, "own": lambda size: own.standard_normal(size)}
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    report = grade(noisy_in_large_batches(draws[kind]), environment="ragged", select="KL2,KL507")
    assert (report.verdict, report.gradients[0].method, report.failed) == ("confirmed", "exact", [])
    np.testing.assert_array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())


def dropped(logp, ref_logp, mask, leak=False):
    both = logp - ref_logp
    kept = F.dropout((both if leak else both.where(mask != 0, 0.0)).square() / 2, 0.3)
    return kept.sum(-1).mean()


@pytest.mark.scheduled
def test_experiments_on_a_random_loss_hold_its_numbers_or_take_the_mean_over_many():
    """What can be seen neither in one draw nor in the mean is left open; the random numbers are a warning."""
    options = {"expect": "local_reverse_kl", "environment": "ragged", "select": "KL1,KL2,KL5"}
    found, leaks = (grade(dropped, arguments={"leak": leak}, **options).checks for leak in (False, True))
    status = {check.code: (check.status, check.level) for check in found}
    held, on_average = ("KL501", "KL503", "KL506"), ("KL105", "KL206", "KL207", "KL504")
    assert [status[code][0] for code in (*held, *on_average)] == ["pass"] * 7
    assert (status["KL507"], status["KL508"]) == (("fail", "warning"), ("inconclusive", "warning"))
    assert [check.code for check in leaks if check.status == "fail" and check.level == "error"] == ["KL501"]


@pytest.mark.scheduled
def test_nothing_is_passed_beyond_rows_that_samples_leave_undecided():
    report = grade(dropped, expect="local_reverse_kl", environment="ragged", samples=10, select="KL1,KL2,KL5")
    open_ = {check.code for check in report.checks if (check.status, check.level) == ("inconclusive", "error")}
    assert report.verdict == "inconclusive"
    assert open_ >= {"KL105", "KL203"}


@pytest.mark.scheduled
def test_random_numbers_in_larger_batches_only_leave_the_verdict_open():
    def loss(logp, ref_logp, mask):
        kl = half_square(logp, ref_logp, mask)
        return F.dropout(kl, 0.2).mean() if len(kl) > 10 else kl.mean()

    report = grade(loss, environment="bandit", select="KL2,KL507")
    assert (report.verdict, report.gradients[0].method, report.errors) == ("inconclusive", "exact", [])


@pytest.mark.parametrize("form", ["root", "quotient"])
def test_what_is_not_finite_where_policy_and_reference_agree_is_an_error(form):
    def root(logp, ref_logp, mask):
        return half_square(logp, ref_logp, mask).mul(2).square().sqrt().div(2).sqrt().square()

    def quotient(logp, ref_logp, mask):
        u = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
        return (u / u.abs() * u.abs()).square() / 2

    found = result("KL503", {"root": root, "quotient": quotient}[form])
    assert (found.status, found.level) == ("fail", "error")
    assert "as when training begins" in found.message


def test_a_column_that_is_squeezed_away_is_found_in_a_batch_of_single_tokens():
    def squeezed(logp, ref_logp, mask):
        u = (logp - ref_logp).where(mask != 0, 0.0).squeeze()
        return (u.sum(-1) ** 2 / 2).mean()

    assert result("KL207", squeezed).status == "fail"
    assert result("KL207", half_square).status == "pass"


def turned(chance):
    """k2, but for a share of the calls that makes the opposite of it in the mean, or more."""

    def loss(logp, ref_logp, mask):
        kl = 0.5 * (logp - ref_logp) ** 2
        if torch.rand(()) < chance:
            kl = -2 / chance * kl
        return (kl * mask).sum(-1).mean()

    return loss


def drawn_beside(logp, ref_logp, mask, beta):
    return torch.rand(()) + beta * (0.5 * (logp - ref_logp) ** 2 * mask).sum(-1).mean()


@pytest.mark.scheduled
@pytest.mark.parametrize("chance", [5e-4, 1e-9])
def test_what_rare_random_numbers_do_is_never_passed(chance):
    report = grade(turned(chance), expect="local_reverse_kl")
    assert report.verdict == "inconclusive"
    assert report == grade(turned(chance), expect="local_reverse_kl"), "the same numbers are drawn in every grading"


@pytest.mark.scheduled
def test_random_numbers_that_cancel_in_the_kl_part_are_none_of_it():
    # Those that the difference of two coefficients takes away are no matter of the KL part.
    assert grade(drawn_beside, expect="local_reverse_kl").verdict == "confirmed"


def guarded(logp, ref_logp, mask):
    assert not ref_logp.requires_grad, "detach the reference"
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum(-1).mean()


@pytest.mark.scheduled
def test_a_guard_against_a_trainable_reference_is_what_is_wanted():
    report = grade(guarded, expect="local_reverse_kl")
    assert report.verdict == "confirmed"
    assert {check.code: check.status for check in report.checks}["KL506"] == "pass"


def four_rows_only(logp, ref_logp, mask):
    assert len(logp) == 4
    return half_square(logp, ref_logp, mask)


def of_groups(logp, ref_logp, mask, group):
    return half_square(logp, ref_logp, mask) + 0 * group


@pytest.mark.parametrize(("loss", "options", "rows"), [(four_rows_only, {}, 4), (of_groups, {"group_size": 5}, 10)])
def test_an_extreme_rollout_has_as_many_companions_as_the_loss_takes_or_two_groups_need(loss, options, rows):
    assert companions(plan(bind(loss), Options.of(**options))) + 1 == rows
