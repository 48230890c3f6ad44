"""Questions that are asked about distillation losses, each answered by a grade: the wrong loss and its right sister."""

import math

import pytest
import torch
from weekly import first, spread

import kltest
from kltest.estimators import find


def codes(target, **options):
    report = kltest.grade(target, **options)
    return {check.code: check for check in report.checks if check.status == "fail"}


def in_the_advantage(logp, logits, ref_logits, beta):
    """A KL of the next token that is subtracted from the advantage (radixark/miles, issue 2362)."""
    log_pi, log_ref = logits.log_softmax(-1).detach(), ref_logits.log_softmax(-1)
    return beta * (log_pi.exp() * (log_pi - log_ref)).sum(-1) * logp


def of_the_drawn_token(logp, ref_logp, beta):
    return beta * (logp - ref_logp).detach() * logp


@pytest.mark.parametrize("loss", first(1, [in_the_advantage, "exact-kl-advantage"]))
def test_a_cost_that_does_not_depend_on_the_drawn_token_is_a_baseline(loss):
    failed = codes(loss, select="KL1")
    assert "as a baseline does not" in failed["KL101"].message
    assert "acts as a baseline" in failed["KL101"].fix


@pytest.mark.scheduled
def test_the_drawn_tokens_log_ratio_in_the_advantage_has_a_gradient_and_k1_as_a_loss_keeps_its_words():
    assert "KL101" not in codes(of_the_drawn_token, select="KL1")
    assert "baseline" not in codes("k1-loss", select="KL1")["KL101"].message


def clamped(topk_logp, ref_topk_logp, k=2):
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1).clamp_min(0.0)


def with_a_floor_below_all(topk_logp, ref_topk_logp, k=2):
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1).clamp_min(-100.0)


@pytest.mark.parametrize("loss", first(1, [clamped, "reverse-kl-topk-clamped"]))
def test_a_truncated_sum_clamped_at_zero_is_dead_on_ordinary_input(loss):
    failed = codes(loss, select="KL504,KL701")
    assert set(failed) == {"KL504", "KL701"}
    assert failed["KL504"].level == "error"
    assert "drawn next-token distributions" in failed["KL504"].message


def clamped_over_four(topk_logp, ref_topk_logp):
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1).clamp_min(0.0)


def whole_and_clamped(logits, ref_logits):
    log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (log_ref.exp() * (log_ref - log_pi)).sum(-1).clamp_min(0.0)


@pytest.mark.scheduled
def test_near_the_reference_a_clamp_shows_over_any_number_of_tokens_and_never_of_a_divergence():
    assert "KL504" in codes(clamped_over_four, select="KL504")
    assert "KL504" not in codes(whole_and_clamped, select="KL504")


@pytest.mark.scheduled
@pytest.mark.parametrize("loss", [with_a_floor_below_all, "forward-kl-topk", "reverse-kl-topk"])
def test_a_truncated_sum_as_it_is_has_no_dead_zone_and_is_no_divergence(loss):
    failed = codes(loss, select="KL504,KL701")
    assert set(failed) == {"KL701"}
    assert "only the 2 likeliest actions under the" in failed["KL701"].message


@pytest.mark.scheduled
@pytest.mark.parametrize("name", ["jensen-shannon", "forward-kl-topk-tail", "reverse-kl-topk-tail", "full-loss"])
def test_what_is_named_may_be_declared(name):
    expect = find(name).spec.expectation("sequence", "current")
    assert kltest.grade(name, expect=next(iter(expect)), select="KL1,KL5,KL7").verdict == "confirmed"


@pytest.mark.parametrize("k", first(1, [2, 1, 3, 4, 64]))
def test_a_support_of_any_size_is_named_by_it(k):
    report = kltest.grade("reverse-kl-topk-tail", arguments={"k": k}, environment="bandit,sequence", select="KL701")
    for row in report.gradients:
        assert row.identified == pytest.approx({f"local_reverse_kl_own{k}_tail": 1.0})


def summed(topk_logp, ref_topk_logp):
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1)


def averaged(topk_logp, ref_topk_logp):
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).mean(-1)


def of_four(topk_logp, ref_topk_logp):
    """Right for four tokens and for no other number."""
    return summed(topk_logp, ref_topk_logp) * (1 if topk_logp.shape[-1] == 4 else 2)


def of_three_at_most(topk_logp, ref_topk_logp):
    return summed(topk_logp[..., :3], ref_topk_logp[..., :3])


def tailed(topk_logp, ref_topk_logp, k=3):
    outside, ref_outside = ((1 - one.exp().sum(-1)).clamp(min=1e-12) for one in (topk_logp, ref_topk_logp))
    return summed(topk_logp, ref_topk_logp) + ref_outside * (ref_outside.log() - outside.log())


@pytest.mark.scheduled
@pytest.mark.parametrize("expect", ["local_forward_kl_top4", "reverse_kl"])
def test_a_sum_over_the_tokens_that_is_divided_by_their_number_is_another_multiple_for_each_number(expect):
    failed = codes(averaged, expect=expect)
    assert "4 times as much over 1, 2 times as much over 2 and 1.333 times as much over 3" in failed["KL701"].message
    assert "divided by their number" in failed["KL701"].message
    # Nothing else of what happens in smaller vocabularies is said.
    assert failed.keys() <= {"KL106", "KL701"}


@pytest.mark.scheduled
def test_a_loss_that_was_written_for_one_number_of_tokens_is_refuted():
    failed = codes(of_four, expect="local_forward_kl_top4")
    assert "2 times as much over 1" in failed["KL701"].message
    assert "divided" not in failed["KL701"].message
    assert (
        kltest.grade(of_four, expect="local_forward_kl_top4", arguments={"k": 4}, select="KL7").verdict == "confirmed"
    )
    assert codes(of_three_at_most, expect="local_forward_kl_top4")


@pytest.mark.scheduled
@pytest.mark.parametrize(("loss", "name"), [(summed, "top4"), (tailed, "top3_tail")])
def test_a_loss_that_is_right_for_every_number_of_tokens_is_confirmed(loss, name):
    report = kltest.grade(loss, expect=f"local_forward_kl_{name}")
    assert report.verdict == "confirmed"


def of_the_teachers(logits, ref_logits, support="student", k=2):
    """Says the student's and takes the teacher's."""
    ids = ref_logits.topk(k, -1).indices
    log_pi, log_ref = (one.log_softmax(-1).gather(-1, ids) for one in (logits, ref_logits))
    return (log_pi.exp() * (log_pi - log_ref)).sum(-1)


def reverse_kl_student_topk(logits, ref_logits):
    return of_the_teachers(logits, ref_logits)


def by_the_students_ids(student_topk_ids, logits, ref_logits, k=2):
    return of_the_teachers(logits, ref_logits, k=student_topk_ids.shape[-1])


def as_it_says(logits, ref_logits, support="teacher", k=2):
    return of_the_teachers(logits, ref_logits, k=k)


def unsaid(logits, ref_logits, k=2):
    return of_the_teachers(logits, ref_logits, k=k)


@pytest.mark.parametrize(
    ("loss", "said"),
    spread(
        2,
        [
            (of_the_teachers, True),
            (reverse_kl_student_topk, True),
            (by_the_students_ids, True),
            (as_it_says, False),
            (unsaid, False),
            ("reverse-kl-topk", False),
        ],
    ),
)
def test_a_support_of_another_side_than_is_said_is_reported(loss, said):
    message = codes(loss, environment="bandit,sequence", select="KL7")["KL701"].message
    assert ("The support is said to be the policy's, and is the reference's." in message) == said


def by_rank(logits, ref_logits, k=2):
    log_pi, log_ref = (one.log_softmax(-1).topk(k, -1).values for one in (logits, ref_logits))
    return (log_pi.exp() * (log_pi - log_ref)).sum(-1)


def sorted_whole(logits, ref_logits):
    return by_rank(logits, ref_logits, k=logits.shape[-1])


@pytest.mark.parametrize("loss", first(1, [by_rank, sorted_whole]))
def test_log_probs_of_two_sides_that_are_compared_by_rank_are_told(loss):
    assert "by rank, whatever their tokens" in codes(loss, environment="bandit", select="KL7")["KL701"].message


@pytest.mark.parametrize("loss", spread(2, [unsaid, "forward-kl-topk", "jensen-shannon", "full-loss", "k2-loss"]))
def test_tokens_that_are_compared_with_themselves_are_none_by_rank(loss):
    failed = codes(loss, environment="bandit", expect="chi_square", select="KL7")
    assert not any("by rank" in check.message for check in failed.values())


def tempered(topk_logp, ref_topk_logp):
    log_pi, log_ref = (topk_logp / 2).log_softmax(-1), ref_topk_logp.log_softmax(-1)
    return (log_ref.exp() * (log_ref - log_pi)).sum(-1)


def tempered_on_both_sides(logits, teacher_logits):
    return kltest.estimators.find("jensen-shannon").function(logits / 0.5, teacher_logits / 0.5)


def untempered(topk_logp, ref_topk_logp):
    return tempered(2 * topk_logp, ref_topk_logp)


@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("loss", "words"),
    first(
        1,
        [
            (
                tempered,
                "the policy's log-probs are divided by a temperature of 2; multiplied by it again, the gradient is E_π",
            ),
            (tempered_on_both_sides, "the policy's and the reference's log-probs are divided by a temperature of 0.5"),
        ],
    ),
)
def test_a_temperature_in_a_loss_over_a_support_or_a_mixture_is_found(loss, words):
    assert words in codes(loss, environment="bandit", select="KL7")["KL702"].message
    assert "KL702" not in codes(untempered, environment="bandit", select="KL7")


def with_a_weight(student_logits, teacher_logits, beta=0.35):
    """As TRL writes it: KLs of teacher and student from the mixture of both, beta the teacher's share."""
    student, teacher = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    mixed = torch.stack([student + math.log(1 - beta), teacher + math.log(beta)]).logsumexp(0)
    of_teacher, of_student = (one.exp() * (one - mixed) for one in (teacher, student))
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


def skewed(logits, ref_logits):
    """A weight that stands in the code alone."""
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    return (q * (q / (0.2 * q + 0.8 * p)).log()).sum(-1)


def skewed_the_other_way(logits, ref_logits):
    p, q = logits.softmax(-1), ref_logits.softmax(-1)
    return (q * (q / (0.8 * q + 0.2 * p)).log()).sum(-1)


@pytest.mark.parametrize(
    ("loss", "name"),
    spread(
        1,
        [
            (with_a_weight, "local_jensen_shannon35"),
            (skewed, "local_skewed_forward_kl20"),
            (skewed_the_other_way, "local_skewed_forward_kl80"),
            ("skewed-reverse-kl", "local_skewed_reverse_kl10"),
            ("generalised-jensen-shannon", "local_jensen_shannon10"),
            ("jensen-shannon", "local_jensen_shannon"),
        ],
    ),
)
def test_a_divergence_from_a_mixture_is_named_with_its_weight(loss, name):
    report = kltest.grade(loss, environment="bandit,sequence", expect=name, select="KL1")
    assert report.verdict == "confirmed"
    for row in report.gradients:
        assert row.identified == pytest.approx({name: 1.0})


def of_whole_rollouts(logp, ref_logp, mask):
    """Each rollout's score, weighed by the derivative of JS(π, ref) at its probability."""
    log_ratio = ((logp - ref_logp) * mask).sum(-1)
    weight = -0.5 * (0.5 + 0.5 * (-log_ratio).exp()).log()
    return weight.detach() * (logp * mask).sum(-1)


@pytest.mark.scheduled
def test_a_divergence_of_whole_rollouts_is_confirmed_where_it_is_declared_and_its_local_form_is_not():
    for name, verdict in {"jensen_shannon": "confirmed", "local_jensen_shannon": "refuted"}.items():
        report = kltest.grade(of_whole_rollouts, environment="bandit,ragged", expect=name, select="KL1,KL2")
        assert report.verdict == verdict
    assert report.smallest is not None
    row = kltest.grade(of_whole_rollouts, environment="ragged", expect="jensen_shannon", select="KL1").gradients[0]
    assert row.identified == pytest.approx({"jensen_shannon": 1.0})
    other = kltest.grade("k2-loss", environment="ragged", expect="jensen_shannon", select="KL1")
    assert other.verdict == "refuted"
    assert other.smallest is not None
    assert other.smallest.code


def of_a_batch(rollout):
    return summed(rollout["topk_logp"], rollout["teacher_topk_logprobs"])


def test_columns_that_are_read_from_a_batch_are_named_as_well():
    row = kltest.grade(of_a_batch, environment="sequence", select="KL701").gradients[0]
    assert row.identified == pytest.approx({"local_forward_kl_top4": 1.0})


@pytest.mark.parametrize(
    "name",
    first(
        1,
        [
            "forward_kl_own2",
            "reverse_kl_top1",
            "reverse_kl_own2_renormalised",
            "forward_kl_top2_tail",
            "jensen_shannon",
        ],
    ),
)
def test_where_a_support_was_declared_the_smallest_failure_has_its_gradient(name):
    """The program runs without kltest: it prints both gradients."""
    report = kltest.grade("k2-loss", expect=f"local_{name}", environment="sequence", select="KL1")
    assert report.verdict == "refuted"
    assert report.smallest is not None
    assert report.smallest.code


def test_the_other_support_is_named_by_its_side():
    report = kltest.grade("reverse-kl-topk", arguments={"support": "teacher"}, environment="sequence", select="KL701")
    assert report.gradients[0].identified == pytest.approx({"local_reverse_kl_top2": 1.0})
