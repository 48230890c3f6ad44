"""A loss without a field that has None for a default takes another branch: it is judged as the first one is."""

import pytest

import kltest


def total(values, mask):
    return values.where(mask != 0, 0.0).sum(-1)


def weight(logp, old_logp, mask):
    return total((logp - old_logp).detach(), mask).exp()


def refused_beyond_four_tokens_without_a_sampler(logp, ref_logp, mask, old_logp=None):
    """Exact wherever it runs; without a sampler it takes three tokens at most, so that little can be tried."""
    square = total(logp - ref_logp, mask).square() / 2
    if old_logp is None:
        if logp.shape[1] > 3:
            raise ValueError("too long")
        return square
    return weight(logp, old_logp, mask) * square


def right_without_a_sampler(logp, ref_logp, mask, old_logp=None):
    square = total(logp - ref_logp, mask).square() / 2
    return square if old_logp is None else weight(logp, old_logp, mask) * square


def first_sixteen_rows_without_a_sampler(logp, ref_logp, mask, old_logp=None):
    square = total(logp - ref_logp, mask).square() / 2
    if old_logp is None:
        return square[:16].sum() / len(square)
    return (weight(logp, old_logp, mask) * square).mean()


def one_of_two(logp, ref_logp, mask, old_logp=None, tokens=None):
    """Only without the tokens, and with a sampler, is the ratio forgotten."""
    square = total(logp - ref_logp, mask).square() / 2
    if old_logp is None or tokens is None:
        return square
    return weight(logp, old_logp, mask) * square


def neither_of_two(logp, ref_logp, mask, old_logp=None, tokens=None):
    square = total(logp - ref_logp, mask).square() / 2
    return square if old_logp is None else weight(logp, old_logp, mask) * square


@pytest.mark.scheduled
def test_what_is_open_in_the_other_branch_is_told_and_leaves_the_verdict_open():
    report = kltest.grade(refused_beyond_four_tokens_without_a_sampler)
    assert report.verdict == "inconclusive"
    unsure = [check.message for check in report.checks if check.status == "inconclusive" and not check.warns]
    assert unsure
    assert all("Without old_logp: " in message for message in unsure)


def capped_without_tokens(logp, ref_logp, old_logp, mask, tokens=None):
    ratio = weight(logp, old_logp, mask)
    return (ratio.clamp(max=7.0) if tokens is None else ratio) * total(logp - ref_logp, mask).square() / 2


def test_a_cap_of_the_other_branch_is_reached_by_a_far_sampler():
    (found,) = kltest.grade(capped_without_tokens, environment="bandit", select="KL306").errors
    assert found.code == "KL306"
    assert "Without tokens: From log-ratios of policy to sampler of about ±2 of one token" in found.message


def test_the_right_branch_is_confirmed():
    assert kltest.grade(right_without_a_sampler).verdict == "confirmed"


@pytest.mark.scheduled
def test_large_batches_are_tried_in_the_other_branch():
    report = kltest.grade(first_sixteen_rows_without_a_sampler)
    assert report.verdict == "refuted"
    assert any("Without old_logp: " in check.message for check in report.errors)


@pytest.mark.scheduled
def test_each_field_is_left_out_alone_and_under_a_stale_sampler():
    report = kltest.grade(one_of_two)
    assert report.verdict == "refuted"
    assert any("without tokens" in check.message for check in report.errors)
    assert kltest.grade(neither_of_two).verdict == "confirmed"


@pytest.mark.scheduled
def test_noise_that_leaves_the_other_branch_undecided_is_told():
    def loss(logp, ref_logp, mask, old_logp=None):
        import torch

        square = total(logp - ref_logp, mask).square() / 2
        if old_logp is None:
            return square * 2 * torch.rand(())
        return weight(logp, old_logp, mask) * square

    report = kltest.grade(loss, samples=200, select="KL101")
    assert report.verdict == "inconclusive"
