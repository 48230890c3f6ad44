"""Sizes of batches that a loss states in its signature or object, or that it needs, and the hint where it fails."""

import pytest
import torch

import kltest


def square(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2


def over_the_stated_size(logp, ref_logp, mask, beta, batch_size=8):
    return beta * square(logp, ref_logp, mask).sum() / batch_size


def absolute_over_the_stated_size(logp, ref_logp, mask, batch_size=8):
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).abs().sum() / batch_size


def viewed(logp, ref_logp, mask, batch_size=8):
    """Right for batches of eight only."""
    assert len(logp) % batch_size == 0
    return (logp - ref_logp).where(mask != 0, 0.0).view(batch_size, -1).sum(-1).square().mean() / 2


def viewed_without_batches(logp, ref_logp, mask, batch_size):
    return (logp - ref_logp).where(mask != 0, 0.0).view(batch_size, -1).sum(-1).square().mean() / 2


def in_parts(logp, ref_logp, mask, micro_batch_size=2):
    parts = square(logp, ref_logp, mask).split(micro_batch_size)
    return sum(part.mean() for part in parts) / len(parts)


def without_the_rest(logp, ref_logp, mask, micro_batch_size=2):
    """Rows behind the last whole part are dropped."""
    parts = square(logp, ref_logp, mask).split(micro_batch_size)[: max(1, len(logp) // micro_batch_size)]
    return sum(part.sum() for part in parts) / len(logp)


class Trainer:
    def __init__(self, batch_size=8):
        self.batch_size = batch_size

    def loss(self, logp, ref_logp, mask, beta):
        return beta * square(logp, ref_logp, mask).sum() / self.batch_size

    def half(self, logp, ref_logp, mask, beta):
        return beta * square(logp, ref_logp, mask).sum() / (2 * self.batch_size)


def halves(logp, ref_logp, mask):
    one, other = square(logp, ref_logp, mask).chunk(2)
    return (one.mean() + other.mean()) / 2


def in_sixes(logp, ref_logp, mask):
    return square(logp, ref_logp, mask).view(6, -1).mean()


def of_a_matrix(logp, ref_logp, mask):
    return (logp @ ref_logp * mask).mean()


def graded(loss, **options):
    return kltest.grade(loss, call=True, **options)


@pytest.mark.scheduled
def test_a_stated_batch_size_is_the_rows_of_the_batch_and_said():
    for loss in (over_the_stated_size, viewed, viewed_without_batches):
        report = graded(loss)
        assert report.verdict == "confirmed", loss
        assert {row.scale for row in report.gradients} == {1.0}
        assert report.filled["batch_size"].startswith("rows of the batch")
    assert any("batch_size is the number of rows" in note for note in graded(viewed).notes)
    assert graded(absolute_over_the_stated_size).verdict == "refuted"


def test_a_size_that_was_given_is_kept():
    report = graded(over_the_stated_size, arguments={"batch_size": 8})
    assert report.filled["batch_size"] == "8"
    assert {check.code for check in report.errors} == {"KL106"}


@pytest.mark.scheduled
def test_a_size_in_an_object_is_the_rows_of_the_batch():
    assert graded(Trainer.loss).verdict == "confirmed"
    assert graded(Trainer.half).verdict == "refuted"


@pytest.mark.scheduled
def test_parts_keep_their_size_and_are_judged_at_more_rows():
    right = graded(in_parts)
    assert right.verdict == "confirmed"
    assert right.filled["micro_batch_size"] == "its default, 2"
    assert {check.code for check in right.warnings} >= {"KL206"}
    assert graded(without_the_rest).verdict == "refuted"


@pytest.mark.scheduled
def test_a_loss_that_is_right_at_the_size_asked_for_is_not_refuted_at_others():
    assert graded(halves, batch_size=2).verdict == "confirmed"


def test_a_shape_error_hints_at_the_options_for_sizes():
    report = graded(in_sixes)
    assert report.verdict == "error"
    assert "It runs on batches of 6 and 12 rows, of those tried: give --batch-size 6" in report.error
    assert "--batch-size" not in graded(in_sixes, batch_size=3).error
    assert graded(in_sixes, batch_size=6, environment="bandit", select="KL1").verdict == "confirmed"


def of_one_row(logp, ref_logp, mask):
    assert len(logp) == 1, "a batch of one"
    return ((logp - ref_logp) * mask).square().sum() / 2


def of_no_size(logp, ref_logp, mask):
    return (torch.zeros(5) * (logp - ref_logp)[:, :0] * mask).sum()


@pytest.mark.parametrize(("loss", "hint"), [(of_one_row, "one rollout at a time"), (of_no_size, "no matter of")])
def test_sizes_are_advised_only_where_one_of_them_runs(loss, hint):
    error = graded(loss).error
    assert hint in error
    assert "--batch-size" not in error


@pytest.mark.scheduled
@pytest.mark.parametrize("size", [2, 3, 5, 6, 8])
def test_parts_of_every_size_that_is_asked_for_can_be_made(size):
    def centred(logp, ref_logp, mask):
        u = ((logp - ref_logp) * mask).sum(-1)
        return ((u - u.mean()).detach() * (logp * mask).sum(-1)).mean()

    report = kltest.grade(centred, select="KL206", batch_size=size, method="sampled", samples=200)
    (check,) = report.checks
    assert check.code == "KL206"
    assert report.error == ""


def token_mean(logp, ref_logp, mask, advantage, beta):
    kl = 0.5 * (logp - ref_logp) ** 2
    return ((beta * kl - advantage[:, None] * logp) * mask).sum() / mask.sum()


@pytest.mark.scheduled
def test_a_group_size_that_was_asked_for_is_no_size_of_batches():
    (check,) = kltest.grade(token_mean, expect="local_reverse_kl", select="KL206", group_size=2).checks
    assert (check.status, check.level) == ("fail", "error")


def likeliest(logits, ref_logits):
    chances, ids = ref_logits.softmax(-1).topk(20)
    return (chances * (chances.log() - logits.log_softmax(-1).gather(-1, ids))).sum(-1)


def test_more_tokens_than_a_vocabulary_has_are_answered_with_what_to_write():
    report = kltest.grade(likeliest, environment="bandit", call=True)
    assert "index k out of range" in report.error
    assert "make the number a parameter of the function, as k=20" in report.error
    assert "--group-size" not in report.error
