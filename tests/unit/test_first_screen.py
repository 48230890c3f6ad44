"""The first screen of every registered estimator: short, narrow, and true to what was found."""

import re

import pytest
import torch
from weekly import first

import kltest
from kltest.estimators import registry
from kltest.render.screen import screen
from kltest.truth import render

ON_EVERY_PUSH = {"k3-loss", "token-mean"}
EVERY = [name if name in ON_EVERY_PUSH else pytest.param(name, marks=pytest.mark.scheduled) for name in registry()]


@pytest.mark.parametrize("name", EVERY)
def test_the_first_screen_of_an_estimator_is_short_narrow_and_true(name):
    report = kltest.grade(name)
    lines = str(report).splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    assert lines[0] == f"{report.verdict.upper()}  {name}"
    words = " ".join(" ".join(lines).split())
    for row in report.gradients:
        if row.identified is not None and row.environment != "bandit":
            assert render(row.identified) in words
    for check in report.errors:
        assert f"{check.code} {check.message.partition('. ')[0]}" in words
    for check in report.warnings:
        assert f"{check.code} {check.name}" in words
    assert report.reach is not None
    assert f"up to {report.reach.tokens} tokens" in words
    assert len(report.to_text(verbose=True).splitlines()) > len(lines)
    assert report.to_text(verbose=True).splitlines()[:5] == lines[:5]


@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("name", "sampler"),
    first(1, [("k3-loss", "current"), ("k2-loss", "current"), ("k3-ratio", "stale"), ("k2-loss", "stale")]),
)
def test_what_the_screen_says_to_declare_is_confirmed(name, sampler):
    options = {"sampler": sampler, "select": "KL1,KL2,KL3"}
    lines = {label: " ".join(texts) for label, texts in screen(kltest.grade(name, **options)).items()}
    expect = lines["declared"].partition("--expect=")[2]
    assert expect
    assert kltest.grade(name, expect=expect, **options).verdict == "confirmed"


@pytest.mark.scheduled
def test_nothing_is_said_to_be_declared_if_it_has_no_single_name():
    for name in ("k1-loss", "token-mean", "k1-reward"):
        assert not any(
            "--expect=" in text for texts in screen(kltest.grade(name, select="KL1")).values() for text in texts
        )


def test_an_error_of_a_loss_that_follows_what_was_declared_says_what_was_found():
    def late(logp, ref_logp, mask):
        return (logp - ref_logp).where((mask != 0) & (mask.cumsum(1) < 40), 0.0).sum(-1) ** 2 / 2

    lines = str(kltest.grade(late, select="KL105")).splitlines()
    assert len(lines) <= 25
    assert "KL105" in (words := " ".join(" ".join(lines).split()))
    assert "In rollouts of 64 tokens, current sampler, the expected gradient is off by" in words


@pytest.mark.scheduled
def test_another_gradient_is_told_with_its_places_and_its_size():
    def capped(logp, ref_logp, mask):
        """Half the square of the rollout's log-ratio, capped in rollouts of several tokens."""
        total = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
        return torch.where(mask.sum(-1) > 1, total.clamp(-0.3, 0.3), total).square() / 2

    def with_entropy(logits, ref_logits):
        own, other = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        return (own.exp() * (1.05 * own - other)).sum(-1)

    (found,) = (check for check in kltest.grade(capped, select="KL105").checks)
    first = found.message.partition(". Found")[0]
    assert re.fullmatch(r"The gradient is unnamed on sequence and ragged, \d(\.\d+)? off; right on bandit", first)
    report = kltest.grade(with_entropy, expect="local_reverse_kl")
    assert [check.code for check in report.errors] == ["KL105"]
    words = " ".join(str(report).split())
    assert "The gradient is one with an entropy bonus on bandit, sequence and ragged, " in words
    assert "--expect=local_reverse_kl-0.05*local_entropy" in words
