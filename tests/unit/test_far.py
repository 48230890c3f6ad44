"""Losses that are right in small and mild environments and wrong farther out: samplers, batches, long rollouts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases.parts import k2, total
from weekly import spread

import kltest
from kltest.checks import CHECKS
from kltest.checks.stress import (
    LONGER,
    STRESS,
    WHOLE_CHUNKS,
    _is_settled,
    _some_unlikely,
    choices_of,
    long_instance,
    tried,
)
from kltest.environments import Instance
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.truth import gradient

LOCAL, BANDIT = {"expect": "local_reverse_kl"}, {"environment": "bandit"}
SHORT = {**LOCAL, "environment": "bandit,sequence"}


def found(loss, code, **options):
    """Verdict of the whole grading, and level and message of a check that failed, both empty if it did not."""
    report = kltest.grade(loss, select=code, **options)
    assert not report.error, report.error
    failed = [check for check in report.checks if check.status == "fail"]
    assert not [check for check in report.checks if check.status == "inconclusive"]
    assert len(failed) < 2
    return report, *((failed[0].code, failed[0].level, failed[0].message) if failed else ("", "", ""))


def test_the_table_names_checks():
    assert {code for kind in STRESS.values() for code in kind.codes} <= set(CHECKS)


def fails_at_the_first(logp, ref_logp, logits, mask):
    """Raises where the reference was moved, and is half too large where the policy was."""
    if (ref_logp < -10).any() and mask.shape[1] == 1:
        raise ValueError("an unlikely token")
    return k2(logp, ref_logp, mask) * (1 + 0.5 * (logits.detach().amin((-1, -2)) < -6.0))


def test_a_case_in_which_the_loss_raises_does_not_hide_the_next():
    report = kltest.grade(fails_at_the_first, select="KL105,KL504", environment="bandit")
    assert report.verdict == "refuted"
    assert "log-ratios" in " ".join(check.message for check in report.failed)


# One token of several that are equally likely stands for all.


def test_rollouts_that_stand_for_others_have_the_gradient_of_all():
    """By enumeration of every rollout, and by the named gradient, which knows the whole environment."""
    some = long_instance(2, 0, 4, alike=True)
    every = Instance(some.environment, some.policy, some.reference, some.sampler)
    assert (len(some.paths), len(every.paths)) == (2**3, 4**4)
    assert some.rollout_weights("stale").sum() == pytest.approx(1, abs=1e-12)
    for sampler in ("current", "stale"):
        loss = resolve(weighted(whole_ratio))
        found, wanted = (exact(loss, one, sampler).gradient for one in (some, every))
        assert np.allclose(found, wanted, atol=1e-9)
        assert np.allclose(wanted, gradient("reverse_kl", every), atol=1e-9)


def test_long_rollouts_are_as_unlikely_as_those_of_trainers_and_sure_tokens_have_a_log_prob_of_zero():
    for alike in (True, False):
        instance = long_instance(1, 0, LONGER, alike=alike)
        assert instance.rollout_weights("current").sum() == pytest.approx(1, abs=1e-9)
        log_probs = instance.paths.chosen(instance.policy)
        others = np.delete(log_probs, choices_of(1, LONGER), axis=1)
        assert (others == (-np.log(4) if alike else 0.0)).all()


@pytest.mark.parametrize(("unlikely", "other"), [("policy", "reference"), ("reference", "policy")])
def test_of_unlikely_tokens_one_of_policy_and_reference_gives_a_hundred_times_as_much(unlikely, other):
    """All but three of sixteen tokens: about e⁻¹³ of the largest probability here, e⁵ times that there."""
    instance = _some_unlikely(SimpleNamespace(seed=0), SimpleNamespace(batch=1), [(unlikely, 16)])
    least, more = (np.exp(getattr(instance, name)[0]) for name in (unlikely, other))
    shares = least[3:] / least.max()
    assert np.log(np.median(shares)) == pytest.approx(-13, abs=1)
    assert np.log(np.median(more[3:] / more.max() / shares)) == pytest.approx(5, abs=1)


def test_choices_stand_at_the_ends_of_blocks_and_beside_them():
    places = [place for length in (64, LONGER, WHOLE_CHUNKS) for place in choices_of(1, length)[1:-1]]
    for block in (2, 4, 8, 16, 32, 64, 128, 256):
        assert {place % block for place in places} >= {0, 1 % block, block - 1}


# Samplers that are far from the policy.


def weighted(weight):
    def loss(logp, ref_logp, old_logp, mask):
        return weight((logp - old_logp).detach(), mask) * k2(logp, ref_logp, mask)

    return loss


def token_ratio_below_seven(log_ratio, mask):
    return log_ratio.exp().clamp(max=7.0).where(mask != 0, 1.0).prod(-1)


def at_most_a_million(log_ratio, mask):
    return total(log_ratio, mask).exp().clamp(max=1e6)


def whole_ratio(log_ratio, mask):
    return total(log_ratio, mask).exp()


# Batches of many sizes.


def seventh_row_and_later_ignored(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    return rows[:6].sum() / len(rows)


def first_five_rows_only(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask)[:5].mean()


def in_chunks(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    return torch.stack([chunk.sum() for chunk in rows.split(4)]).sum() / len(rows)


# Long rollouts.


def token_k2(logp, ref_logp):
    return (logp - ref_logp).square() / 2


def first_thirty_tokens(logp, ref_logp, mask):
    return total(token_k2(logp, ref_logp)[:, :30], mask[:, :30])


def credit(logp, ref_logp, mask, factor):
    """Each token's score times the log-ratios from it on, each times a factor of their distance (T, T)."""
    ratios = (logp - ref_logp).detach().where(mask != 0, 0.0)
    steps = torch.arange(logp.shape[1])
    distance = steps[None, :] - steps[:, None]
    to_go = ratios @ torch.where(distance >= 0, factor(distance), 0.0).T.to(ratios)
    return total(to_go * logp, mask)


def horizon_of_twenty_five(logp, ref_logp, mask):
    return credit(logp, ref_logp, mask, lambda distance: (distance <= 25).double())


def less_if_long(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask) / (mask.sum(-1) / 16).clamp(min=1)


def nothing_if_long(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask) * (mask.sum(-1) <= 48)


@pytest.mark.scheduled
def test_a_report_says_how_far_it_looked():
    report = kltest.grade(weighted(whole_ratio))
    assert report.verdict == "confirmed"
    assert (report.reach.tokens, report.reach.rows, round(report.reach.sampler)) == (4096, 1031, 19)


def of_unsure_tokens(logp, ref_logp, mask):
    """Tokens that the policy is sure of are left out, as for losses of high-entropy tokens alone."""
    unsure = mask * (logp.detach() < -0.05)
    return ((logp - ref_logp).square() / 2 * unsure).sum(-1).mean()


def score_of_the_undecided(logp, ref_logp, mask):
    """REINFORCE with k1 in the reward; tokens of probability above 0.999 get no score."""
    undecided = mask * (logp.detach() < -0.001)
    return ((logp - ref_logp).detach().where(mask != 0, 0.0).sum(-1) * (logp * undecided).sum(-1)).mean()


def leave_one_out(cost, logp, mask):
    others = (cost.sum() - cost) / max(len(cost) - 1, 1)
    return ((cost - others).detach() * total(logp, mask)).mean()


def unsure_in_a_batch(logp, ref_logp, mask):
    return leave_one_out(total((logp - ref_logp) * (ref_logp < -0.02), mask), logp, mask)


def guarded(logits, ref_logits, mask):
    p, q = logits.exp(), ref_logits.exp()
    return total((p * ((p + 1e-8).log() - (q + 1e-8).log())).sum(-1), mask)


def without_special_tokens(logp, ref_logp, tokens, mask):
    return total(logp - ref_logp, mask * (tokens < 100)).square() / 2


FAR = [
    # Of samplers, batches, long rollouts, sure tokens and vocabularies: an error, a warning, and what is right.
    (weighted(token_ratio_below_seven), "KL306", {}, "KL306 error", "±2 of one token"),
    (weighted(at_most_a_million), "KL306", {}, "KL306 warning", "±14 of one token"),
    (weighted(whole_ratio), "KL306", {}, "", ""),
    (seventh_row_and_later_ignored, "KL204", {}, "KL204 error", "In batches of 7 "),
    (first_five_rows_only, "KL204,KL206", {}, "KL206 warning", ""),
    (in_chunks, "KL204", {}, "", ""),
    (first_thirty_tokens, "KL105,KL203,KL205", LOCAL, "KL105 error", "it differs at tokens 31, 40, 63"),
    (horizon_of_twenty_five, "KL105,KL203,KL205", {}, "KL205 error", "it differs at tokens 0, 16, 31 of"),
    (k2, "KL105,KL203,KL205", {}, "", ""),
    (nothing_if_long, "KL105,KL203,KL205", {}, "KL105 error", "nothing is left of it"),
    (less_if_long, "KL105,KL203,KL205", {}, "KL203 error", "0.25 times the declared one"),
    (of_unsure_tokens, "KL105", SHORT, "KL105 error", "0.993 under the policy and 0.12 under the reference"),
    (score_of_the_undecided, "KL105", BANDIT, "KL105 error", "0.9992 under the policy and 0.905 under the reference"),
    (unsure_in_a_batch, "KL105", BANDIT, "KL105 error", "0.905 under the policy and 0.9992 under the reference"),
    (guarded, "KL105", LOCAL, "", ""),
    (without_special_tokens, "KL105", BANDIT, "KL105 error", "In a bandit with 307 actions"),
]


@pytest.mark.parametrize(("loss", "select", "options", "said", "words"), spread(3, FAR))
def test_what_is_wrong_farther_out_is_found_and_nothing_else(loss, select, options, said, words):
    report, code, level, message = found(loss, select, **options)
    assert f"{code} {level}".strip() == said
    assert report.verdict == ("refuted" if level == "error" else "confirmed")
    assert words in message
    if loss is guarded:
        assert report.reach.probability > 0.999


@pytest.mark.scheduled
def test_a_loss_that_sees_tokens_is_tried_with_many_and_any_other_is_not():
    report, code, _, _ = found(guarded, "KL105", expect="local_reverse_kl")
    assert (code, report.reach.vocabulary) == ("", 307)
    assert kltest.grade(k2, select="KL105").reach.vocabulary == 16


def drawn_from_the_vocabulary(logits, ref_logits, mask):
    """Right, and with so much noise near certainty that no mean over some thousand draws tells."""
    policy, reference = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    chances = policy.detach().exp().flatten(0, 1)
    drawn = torch.multinomial(chances, 4, replacement=True).reshape(*policy.shape[:2], 4)
    own, other = policy.gather(-1, drawn), reference.gather(-1, drawn)
    return (own * (own - other).detach()).mean(-1) * (mask != 0)


@pytest.mark.scheduled
def test_what_may_be_noise_refutes_nothing():
    report = kltest.grade(drawn_from_the_vocabulary, expect="local_reverse_kl", environment="bandit", select="KL105")
    (check,) = report.checks
    assert (report.verdict, check.status, check.level) == ("inconclusive", "inconclusive", "error")
    assert "may be noise" in check.message


@pytest.mark.parametrize(
    ("bias", "noise", "settled"), [(0.01, None, True), (0.5, None, False), (0.5, 0.01, True), (0.2, 0.1, False)]
)
def test_means_over_draws_are_drawn_anew_until_they_are_right_or_surely_wrong(bias, noise, settled):
    assert _is_settled([0.0, bias], None if noise is None else [noise, noise]) == settled


def a_hundred_actions_at_most(logits, ref_logits, mask):
    assert logits.shape[-1] <= 110
    return total((logits.exp() * (logits - ref_logits)).sum(-1), mask)


def test_where_a_loss_refuses_what_is_far_nearer_cases_are_tried():
    findings = Grading.of("", Options.of(environment="bandit", expect="local_reverse_kl")).measured(
        a_hundred_actions_at_most
    )
    assert [off.setting for off in tried(findings, STRESS["many tokens"])] == [102]
