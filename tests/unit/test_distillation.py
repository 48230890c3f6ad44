"""Questions that are asked about distillation losses, each answered by a grade: the wrong loss and its right sister."""

import pytest

import kltest


def codes(target, **options):
    report = kltest.grade(target, **options)
    return {check.code: check for check in report.checks if check.status == "fail"}


def in_the_advantage(logp, logits, ref_logits, beta):
    """A KL of the next token that is subtracted from the advantage (radixark/miles, issue 2362)."""
    log_pi, log_ref = logits.log_softmax(-1).detach(), ref_logits.log_softmax(-1)
    return beta * (log_pi.exp() * (log_pi - log_ref)).sum(-1) * logp


def of_the_drawn_token(logp, ref_logp, beta):
    return beta * (logp - ref_logp).detach() * logp


@pytest.mark.parametrize("loss", [in_the_advantage, "exact-kl-advantage"])
def test_a_cost_that_does_not_depend_on_the_drawn_token_is_a_baseline(loss):
    failed = codes(loss, select="KL1")
    assert "as a baseline does not" in failed["KL101"].message
    assert "acts as a baseline" in failed["KL101"].fix


def test_the_drawn_tokens_log_ratio_in_the_advantage_has_a_gradient_and_k1_as_a_loss_keeps_its_words():
    assert "KL101" not in codes(of_the_drawn_token, select="KL1")
    assert "baseline" not in codes("k1-loss", select="KL1")["KL101"].message


def clamped(topk_logp, ref_topk_logp, k=2):
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1).clamp_min(0.0)


def with_a_floor_below_all(topk_logp, ref_topk_logp, k=2):
    return (ref_topk_logp.exp() * (ref_topk_logp - topk_logp)).sum(-1).clamp_min(-100.0)


@pytest.mark.parametrize("loss", [clamped, "reverse-kl-topk-clamped"])
def test_a_truncated_sum_clamped_at_zero_is_dead_on_ordinary_input(loss):
    failed = codes(loss, select="KL504,KL701")
    assert set(failed) == {"KL504", "KL701"}
    assert failed["KL504"].level == "error"
    assert "drawn next-token distributions" in failed["KL504"].message


@pytest.mark.parametrize("loss", [with_a_floor_below_all, "forward-kl-topk", "reverse-kl-topk"])
def test_a_truncated_sum_as_it_is_has_no_dead_zone_and_is_no_divergence(loss):
    failed = codes(loss, select="KL504,KL701")
    assert set(failed) == {"KL701"}
    assert "only the 2 likeliest actions under the" in failed["KL701"].message


@pytest.mark.parametrize("name", ["forward-kl-topk-tail", "reverse-kl-topk-tail", "jensen-shannon", "full-loss"])
def test_what_is_named_may_be_declared(name):
    expect = kltest.estimators.find(name).spec.expectation("sequence", "current")
    assert kltest.grade(name, expect=next(iter(expect)), select="KL1,KL5,KL7").verdict == "confirmed"


@pytest.mark.parametrize("k", [1, 2, 3, 4, 64])
def test_a_support_of_any_size_is_named_by_it(k):
    report = kltest.grade("reverse-kl-topk-tail", arguments={"k": k}, environment="bandit,sequence", select="KL701")
    for row in report.gradients:
        assert row.identified == pytest.approx({f"local_reverse_kl_own{k}_tail": 1.0})


def test_the_other_support_is_named_by_its_side():
    report = kltest.grade("reverse-kl-topk", arguments={"support": "teacher"}, environment="sequence", select="KL701")
    assert report.gradients[0].identified == pytest.approx({"local_reverse_kl_top2": 1.0})
