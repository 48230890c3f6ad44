"""A disagreement is computed twice before it is reported; a defect of kltest in either route shows."""

import time

import pytest
from weekly import first

import kltest
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.identify import second_route
from kltest.identify.second_route import DisagreementError
from kltest.moments import projection
from kltest.truth import gradients

# What is measured while a bug is planted stays in caches: of a seed that nothing else draws from.
SEED = 770_077


def right(logp, ref_logp, mask):
    return 0.5 * ((logp - ref_logp) * mask).sum(-1) ** 2


def per_token(logp, ref_logp, mask):
    return 0.5 * (((logp - ref_logp) * mask) ** 2).sum(-1)


def added_up(logp, ref_logp, mask):
    return per_token(logp, ref_logp, mask).sum()


def token_mean(logp, ref_logp, mask):
    return per_token(logp, ref_logp, mask).sum() / mask.sum()


def of_logits(logits, ref_logits, mask):
    return ((ref_logits.exp() * (ref_logits - logits)).sum(-1) * mask).sum(-1)


def with_ratio(logp, ref_logp, old_logp, mask):
    return ((logp - old_logp).exp().detach() * 0.5 * (logp - ref_logp) ** 2 * mask).sum(-1)


def leave_one_out(logp, ref_logp, mask, reward, group, beta):
    """Right, and undefined for a batch of one, so that only whole groups are compared."""
    cost = beta * ((logp - ref_logp) * mask).sum(-1).detach() - reward
    same = (group[:, None] == group[None, :]).double()
    return ((cost - (same @ cost - cost) / (same.sum(1) - 1)) * (logp * mask).sum(-1)).mean()


@pytest.fixture
def compared(monkeypatch):
    """(environment, sampler, rows of a batch) of every comparison by the second route."""
    places = []

    def look(call, case, moments, declared):
        places.append((case.environment, case.sampler, moments.batch))
        real(call, case, moments, declared)

    real = second_route.compare
    monkeypatch.setattr(second_route, "compare", look)
    return places


@pytest.mark.parametrize("loss", first(2, [per_token, added_up, token_mean, of_logits, with_ratio]))
def test_every_exact_row_that_disagrees_is_computed_twice_and_the_routes_agree(loss, compared):
    report = kltest.grade(loss)
    assert report.verdict == "refuted"
    wrong = {(row.environment, row.sampler, row.batch) for row in report.gradients if row.agrees is False}
    assert wrong
    assert wrong <= set(compared)


def test_what_agrees_is_computed_once(compared):
    assert kltest.grade(right).verdict == "confirmed"
    assert compared == []


@pytest.mark.parametrize(("loss", "rows"), first(1, [(right, {1}), (leave_one_out, {4})]))
def test_a_bug_in_a_named_gradient_is_no_disagreement_of_the_loss(loss, rows, monkeypatch, compared):
    true = gradients._WHOLE["reverse_kl"]
    monkeypatch.setitem(gradients._WHOLE, "reverse_kl", lambda instance: true(instance) * 1.01)
    with pytest.raises(DisagreementError, match="declared gradient"):
        kltest.grade(loss, seed=SEED)
    assert {batch for _, _, batch in compared} == rows


def test_a_bug_in_the_expected_gradient_is_no_disagreement_of_the_loss(monkeypatch):
    true = projection.softmax_gradient
    monkeypatch.setattr(projection, "softmax_gradient", lambda weights, policy: true(weights, policy) * 1.01)
    with pytest.raises(DisagreementError, match="table of logits"):
        kltest.grade(right)


def test_a_loss_that_does_not_repeat_itself_is_told_before_kltest_is_at_fault(monkeypatch):
    """It follows the clock, but only from the first disagreement on."""
    late = []

    def disagrees(*_):
        late.append(True)
        raise DisagreementError("planted")

    def by_the_clock(logp, ref_logp, mask):
        return per_token(logp, ref_logp, mask) * (2 + time.perf_counter_ns() % 97 if late else 2)

    monkeypatch.setattr(second_route, "compare", disagrees)
    grading = Grading.of("", Options.of(environment="sequence"))
    findings = grading.measured(by_the_clock)
    assert late
    assert "different gradients" in findings.observed.nondeterministic
