"""Losses that are right in small and mild environments and wrong farther out: samplers, batches, long rollouts."""

import pytest
import torch
from cases.parts import k2, total
from weekly import spread

import kltest
from kltest.checks import CHECKS
from kltest.checks.stress import STRESS

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


# Samplers that are far from the policy.


def weighted(weight):
    def loss(logp, ref_logp, old_logp, mask):
        return weight((logp - old_logp).detach(), mask) * k2(logp, ref_logp, mask)

    return loss


def token_ratio_below_seven(log_ratio, mask):
    return log_ratio.exp().clamp(max=7.0).where(mask != 0, 1.0).prod(-1)


def truncated_at_a_thousand(log_ratio, mask):
    return total(log_ratio, mask).exp().clamp(max=1000.0)


def unlikely_rows_dropped(log_ratio, mask):
    worst = log_ratio.where(mask != 0, 0.0).amax(-1)
    return total(log_ratio, mask).exp() * (worst < 3.5)


def never_below_a_tenth(log_ratio, mask):
    return total(log_ratio, mask).exp().clamp(min=0.1)


def at_most_a_million(log_ratio, mask):
    return total(log_ratio, mask).exp().clamp(max=1e6)


def prefix_ratio(logp, ref_logp, old_logp, mask):
    ratio = (logp - old_logp).detach().where(mask != 0, 0.0).cumsum(-1).exp()
    return ratio * (logp - ref_logp).square() / 2


def whole_ratio(log_ratio, mask):
    return total(log_ratio, mask).exp()


def clamped_at_twenty(log_ratio, mask):
    return total(log_ratio.clamp(-20, 20), mask).clamp(-20, 20).exp()


def in_float32(log_ratio, mask):
    return total(log_ratio.float(), mask).exp()


# Batches of many sizes.


def seventh_row_and_later_ignored(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    return rows[:6].sum() / len(rows)


def own_mean_subtracted_from_sixteen_rows(logp, ref_logp, mask):
    kl = total(logp - ref_logp, mask).detach()
    baseline = kl.mean() if len(kl) >= 16 else 0.0
    return ((kl - baseline) * total(logp, mask)).mean()


def shortest_row_left_out(logp, ref_logp, mask):
    rows = k2(logp, ref_logp, mask)
    if len(rows) < 5:
        return rows.mean()
    return rows[mask.sum(-1).argsort(stable=True)[1:]].mean()


def first_five_rows_only(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask)[:5].mean()


def mean_of_the_others_subtracted(logp, ref_logp, mask):
    kl = total(logp - ref_logp, mask).detach()
    others = (kl.sum() - kl) / (len(kl) - 1) if len(kl) > 3 else 0.0
    return ((kl - others) * total(logp, mask)).mean()


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


def decay_after_ten(logp, ref_logp, mask):
    return credit(logp, ref_logp, mask, lambda distance: 0.95 ** (distance - 10).clamp(min=0))


def everything_to_go(logp, ref_logp, mask):
    return credit(logp, ref_logp, mask, torch.ones_like)


def less_if_long(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask) / (mask.sum(-1) / 16).clamp(min=1)


def nothing_if_long(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask) * (mask.sum(-1) <= 48)


def test_a_report_says_how_far_it_looked():
    report = kltest.grade(weighted(whole_ratio))
    assert report.verdict == "confirmed"
    assert (report.reach.tokens, report.reach.rows, round(report.reach.sampler)) == (1024, 256, 19)


def of_unsure_tokens(logp, ref_logp, mask):
    """Tokens that the policy is sure of are left out, as for losses of high-entropy tokens alone."""
    unsure = mask * (logp.detach() < -0.05)
    return ((logp - ref_logp).square() / 2 * unsure).sum(-1).mean()


def of_the_likely_half(logits, ref_logits, mask):
    """The exact divergence over tokens of probability below 0.98; the others are taken as certain."""
    terms = torch.where(logits.detach() < -0.02, logits.exp() * (logits - ref_logits), 0.0).sum(-1)
    return (terms * mask).sum(-1).mean()


def if_the_reference_is_unsure(logp, ref_logp, mask):
    unsure = mask * (ref_logp < -0.02)
    return ((logp - ref_logp).square() / 2 * unsure).sum(-1).mean()


def of_positions_with_entropy(logits, logp, ref_logp, mask):
    """Positions at which the next token is almost decided are left out."""
    entropy = -(logits.exp() * logits).detach().sum(-1)
    return ((logp - ref_logp).square() / 2 * mask * (entropy > 0.2)).sum(-1).mean()


def unless_both_are_sure(logits, ref_logits, mask):
    """The exact divergence, except at positions at which policy and reference are sure."""
    sure = (logits.detach().amax(-1) > -0.01) & (ref_logits.amax(-1) > -0.01)
    exact = (logits.exp() * (logits - ref_logits)).sum(-1)
    return (exact * mask * ~sure).sum(-1).mean()


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


def absolute(logp, ref_logp):
    return (logp - ref_logp).abs()


def narrow(logp, ref_logp, mask):
    return total((logp.float() - ref_logp.float()).square() / 2, mask)


def without_special_tokens(logp, ref_logp, tokens, mask):
    return total(logp - ref_logp, mask * (tokens < 100)).square() / 2


def in_whole_blocks(logits, ref_logits, mask, block=64):
    """The exact divergence, block by block of the vocabulary; what is left of it after whole blocks is forgotten."""
    terms = logits.exp() * (logits - ref_logits)
    vocabulary = terms.shape[-1]
    return total(terms[..., : vocabulary // block * block or vocabulary].sum(-1), mask)


def special_tokens_of_a_batch(logp, ref_logp, tokens, mask):
    return leave_one_out(total(logp - ref_logp, mask * (tokens < 100)), logp, mask)


FAR = [
    # Of samplers, batches, long rollouts, sure tokens and vocabularies: an error, a warning, and what is right.
    (weighted(at_most_a_million), "KL306", {}, "KL306 warning", "±14 of one token"),
    (weighted(whole_ratio), "KL306", {}, "", ""),
    (seventh_row_and_later_ignored, "KL204", {}, "KL204 error", "In a batch of 7 "),
    (first_five_rows_only, "KL204,KL206", {}, "KL206 warning", ""),
    (in_chunks, "KL204", {}, "", ""),
    (first_thirty_tokens, "KL105,KL203,KL205", LOCAL, "KL105 error", "it differs at tokens 42, 63"),
    (horizon_of_twenty_five, "KL105,KL203,KL205", {}, "KL205 error", "it differs at tokens 0, 5, 19 of"),
    (k2, "KL105,KL203,KL205", {}, "", ""),
    (of_unsure_tokens, "KL105", SHORT, "KL105 error", "0.96 under the policy and 0.5 under the reference"),
    (score_of_the_undecided, "KL105", BANDIT, "KL105 error", "0.9992 under the policy and 0.905 under the reference"),
    (unsure_in_a_batch, "KL105", BANDIT, "KL105 error", "0.905 under the policy and 0.9992 under the reference"),
    (guarded, "KL105", LOCAL, "", ""),
    (without_special_tokens, "KL105", BANDIT, "KL105 error", "In a bandit with 300 actions"),
    # More of the same kinds.
    # Samplers: a bound that training reaches is an error, one far out a warning.
    (weighted(token_ratio_below_seven), "KL306", {}, "KL306 error", "±2 of one token"),
    (weighted(truncated_at_a_thousand), "KL306", {}, "KL306 error", "±7 summed over a rollout"),
    (weighted(unlikely_rows_dropped), "KL306", {}, "KL306 error", "±3.5 of one token"),
    (weighted(never_below_a_tenth), "KL306", {}, "KL306 error", "±2.5 of one token"),
    (weighted(clamped_at_twenty), "KL306", {}, "", ""),
    (weighted(in_float32), "KL306", {}, "", ""),
    (prefix_ratio, "KL306", LOCAL, "", ""),
    # Batches: where the expectation is right and a batch is noisier there is a warning.
    (own_mean_subtracted_from_sixteen_rows, "KL204", {}, "KL204 error", "In a batch of 16 "),
    (shortest_row_left_out, "KL204", {}, "KL204 error", "In a batch of 5 "),
    (mean_of_the_others_subtracted, "KL204,KL206", {}, "KL206 warning", ""),
    # Long rollouts.
    (nothing_if_long, "KL105,KL203,KL205", {}, "KL105 error", "nothing is left of it"),
    (decay_after_ten, "KL105,KL203,KL205", {}, "KL205 error", "it differs at tokens 0, 5, 19, 42 of"),
    (less_if_long, "KL105,KL203,KL205", {}, "KL203 error", "0.25 times the declared one"),
    (everything_to_go, "KL105,KL203,KL205", {}, "", ""),
    # Policies and references that are sure of a token.
    (of_the_likely_half, "KL105", SHORT, "KL105 error", "0.993 under the policy and 0.65 under the reference"),
    (if_the_reference_is_unsure, "KL105", SHORT, "KL105 error", "0.65 under the policy and 0.993 under the reference"),
    (of_positions_with_entropy, "KL105", SHORT, "KL105 error", "0.96 under the policy and 0.5 under the reference"),
    (unless_both_are_sure, "KL105", SHORT, "KL105 error", "0.993 under the policy and 0.9992 under the reference"),
    (absolute, "KL105", {"expect": "2*local_total_variation"}, "", ""),
    (narrow, "KL105", LOCAL, "", ""),
    # Many tokens to choose from.
    (in_whole_blocks, "KL105", BANDIT | LOCAL, "KL105 error", "In a bandit with 300 actions"),
    (special_tokens_of_a_batch, "KL105", BANDIT, "KL105 error", "In a bandit with 300 actions"),
]


@pytest.mark.parametrize(("loss", "select", "options", "said", "words"), spread(6, FAR))
def test_what_is_wrong_farther_out_is_found_and_nothing_else(loss, select, options, said, words):
    report, code, level, message = found(loss, select, **options)
    assert f"{code} {level}".strip() == said
    assert report.verdict == ("refuted" if level == "error" else "confirmed")
    assert words in message
    if loss in (guarded, absolute, narrow):
        assert report.reach.probability > 0.999


def test_a_loss_that_sees_tokens_is_tried_with_many_and_any_other_is_not():
    report, code, _, _ = found(guarded, "KL105", expect="local_reverse_kl")
    assert (code, report.reach.vocabulary) == ("", 300)
    assert kltest.grade(k2, select="KL105").reach.vocabulary == 4


def drawn_from_the_vocabulary(logits, ref_logits, mask):
    """Right, and with so much noise near certainty that no mean over some thousand draws tells."""
    policy, reference = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    chances = policy.detach().exp().flatten(0, 1)
    drawn = torch.multinomial(chances, 2, replacement=True).reshape(*policy.shape[:2], 2)
    return ((policy - reference).gather(-1, drawn) ** 2 / 2).mean(-1) * (mask != 0)


@pytest.mark.scheduled
def test_what_may_be_noise_refutes_nothing():
    report = kltest.grade(drawn_from_the_vocabulary, expect="local_reverse_kl", environment="bandit", select="KL105")
    (check,) = report.checks
    assert (report.verdict, check.status, check.level) == ("inconclusive", "inconclusive", "error")
    assert "may be noise" in check.message
