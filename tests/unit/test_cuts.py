"""Numbers in a signature beyond all lengths and batches that are tried: each wrong loss beside its right sister."""

import numpy as np
import pytest
import torch
from weekly import first

import kltest
from kltest.checks import cuts
from kltest.checks.cuts import _in_large_vocabulary, _is_another
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.loss.constants import exchanged_numbers, numbers_above, watched_numbers
from kltest.names import training_step

STEPS = "step global_step globalStep trainer.state.global_step inner_epoch ppo_epoch epoch_idx micro_step iter"
NO_STEPS = "steps num_epochs step_size max_iter n_iter warmup_step start_epoch sinkhorn_iter time_step k"


@pytest.mark.parametrize("name", STEPS.split())
def test_a_name_that_says_a_step_of_training(name):
    assert training_step(name) == 1


@pytest.mark.parametrize("name", NO_STEPS.split())
def test_a_name_that_says_none(name):
    assert training_step(name) is None


def square(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2


def longest(logp, ref_logp, mask, max_length=512):
    return square(logp[:, :max_length], ref_logp[:, :max_length], mask[:, :max_length])


def floor_of_tokens(logp, ref_logp, mask, min_tokens=4096.0):
    return square(logp, ref_logp, mask).sum() / mask.sum().clamp(min=min_tokens)


def without_the_rest(logp, ref_logp, mask, chunk=1024):
    rows = square(logp, ref_logp, mask)
    return sum(part.sum() for part in rows.split(chunk) if len(part) in (chunk, len(rows))) / len(rows)


def last_token_dropped(logp, ref_logp, mask, tokens, eos_token_id=151645):
    return square(logp, ref_logp, mask * (tokens != eos_token_id))


class Settings:
    def __init__(self):
        self.max_tokens = 2048


def in_an_object(logp, ref_logp, mask, config: Settings):
    kept = mask * (torch.arange(mask.shape[1]) < config.max_tokens)
    return square(logp, ref_logp, kept)


WRONG = {
    longest: "max_length",
    floor_of_tokens: "min_tokens",
    without_the_rest: "chunk",
    last_token_dropped: "eos_token_id",
    in_an_object: "config.max_tokens",
}


def over_the_longest(logp, ref_logp, mask, max_length=512):
    return square(logp, ref_logp, mask).sum() / (len(logp) * max_length)


def refused_if_longer(logp, ref_logp, mask, max_length=512):
    assert mask.shape[1] <= max_length
    return square(logp, ref_logp, mask)


def in_chunks(logp, ref_logp, mask, chunk=1024):
    rows = square(logp, ref_logp, mask)
    return sum(part.sum() for part in rows.split(chunk)) / len(rows)


def after_the_end(logp, ref_logp, mask, tokens, eos_token_id=151645):
    """What follows the end of a rollout is padding anyway."""
    ended = (tokens == eos_token_id).cumsum(-1) - (tokens == eos_token_id).long()
    return square(logp, ref_logp, mask * (ended == 0))


def bounded_far_away(logp, ref_logp, mask, bound=100.0):
    return square((logp - ref_logp).clamp(-bound, bound), 0.0, mask)


def many_rows_are_dropped(logp, ref_logp, mask):
    rows = square(logp, ref_logp, mask)
    return rows[:512].sum() / len(rows)


class Limits:
    tokens = 2048


def shared_limit():
    limit = 4096

    def loss(logp, ref_logp, mask):
        return square(logp, ref_logp, mask) * (mask.sum(-1) < limit) * (mask.shape[1] < Limits.tokens)

    return loss


def test_numbers_are_watched_and_exchanged_in_code_closures_and_classes_and_all_is_as_it_was_afterwards():
    """Rows of 0 and 2 tokens in 3 columns: what is compared with the numbers, and what is left where they are 2."""
    loss, seen = shared_limit(), {}
    mask = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    assert {512, 4096, 2048}.issuperset(numbers_above(loss, 257) | numbers_above(many_rows_are_dropped, 257))
    with watched_numbers(loss, {4096, 2048}, seen, ids=False):
        loss(mask, 0 * mask, mask)
    assert seen == {4096: [2], 2048: [3]}
    with exchanged_numbers(loss, {4096: 2}):
        assert loss(mask, 0 * mask, mask).tolist() == [0.0, 0.0]
    assert loss(mask, 0 * mask, mask).tolist() == [0.0, 2.0]
    code = many_rows_are_dropped.__code__
    with exchanged_numbers(many_rows_are_dropped, {512: 1}):
        assert many_rows_are_dropped(mask, 0 * mask, mask) == 0.0
    assert many_rows_are_dropped.__code__ is code


RIGHT = (over_the_longest, refused_if_longer, in_chunks, after_the_end, bounded_far_away)


@pytest.mark.parametrize(("loss", "name"), first(1, WRONG.items()), ids=lambda one: getattr(one, "__name__", one))
def test_a_number_that_cuts_is_named_in_a_warning(loss, name):
    report = kltest.grade(loss)
    # So many rows, and tokens of all, are called as they are as well.
    assert report.verdict == ("refuted" if loss in (floor_of_tokens, without_the_rest) else "confirmed")
    (found,) = [check for check in report.warnings if check.code == "KL105"]
    does = "depends on" if loss is floor_of_tokens else "cuts at"
    assert f"It {does} {name}, which is" in found.message
    assert not [note for note in report.notes if "the gradient is the same" in note]


@pytest.mark.parametrize("loss", first(1, RIGHT), ids=lambda one: one.__name__)
def test_a_number_that_changes_nothing_is_no_finding(loss):
    report = kltest.grade(loss)
    assert report.verdict == "confirmed"
    assert "KL105" not in {check.code for check in report.failed}


def test_what_was_tried_is_told():
    assert any(
        "chunk is 1024; the gradient is the same, up to a factor, at 1, 2, 3, 5 and 7" in n
        for n in kltest.grade(in_chunks).notes
    )


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_a_gradient_is_another_one_whatever_its_unit(unit):
    usual, other = unit * np.random.default_rng(0).standard_normal((2, 3, 4))
    assert not _is_another(usual, 2 * usual, 1e-9, False)
    assert _is_another(usual, usual + 1e-3 * other, 1e-4, False)
    assert not _is_another(usual, usual + 1e-3 * other, 1e-2, False)


def nothing_in_large_vocabularies(logits, ref_logits, mask):
    policy, reference = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum(-1).where(mask != 0, 0.0).sum(-1)
    return kl * (logits.shape[-1].bit_length() < 13)


def test_a_gradient_that_is_gone_in_a_large_vocabulary_is_an_error(monkeypatch):
    monkeypatch.setattr(cuts, "MANY_IDS", 9999)
    grading = Grading.of("", Options.of(environment="bandit", expect="local_reverse_kl"))
    found = _in_large_vocabulary(grading.measured(nothing_in_large_vocabularies))
    assert found is not None
    assert found.level == "error"
    assert "In a vocabulary of 10,000 tokens" in found.message


def renormalised(topk_logp, ref_topk_logp, mask, k=4):
    policy, reference = topk_logp.log_softmax(-1), ref_topk_logp.log_softmax(-1)
    return (policy.exp() * (policy - reference)).sum(-1).where(mask != 0, 0.0)


@pytest.mark.parametrize("k", [4, 40])
def test_the_likeliest_tokens_are_as_many_in_a_large_vocabulary_or_it_is_not_tried(monkeypatch, k):
    monkeypatch.setattr(cuts, "MANY_IDS", 9999)
    expect = f"local_reverse_kl_top{k}_renormalised"
    grading = Grading.of("", Options.of(environment="bandit", expect=expect, arguments={"k": k}))
    findings = grading.measured(renormalised)
    assert [row.agrees for row in findings.rows] == [True]
    assert _in_large_vocabulary(findings) is None


def test_a_length_that_is_reached_refutes():
    def shorter(logp, ref_logp, mask, max_length=40):
        return longest(logp, ref_logp, mask, max_length)

    assert kltest.grade(shorter).verdict == "refuted"
