"""Texts that one would file upstream: their numbers by hand, for every recorded setting, neutral, with a program."""

import math
import re

import numpy as np
import pytest

from kltest.adapters import find
from kltest.errors import UsageError
from kltest.scoreboard import recorded
from kltest.scoreboard.classes import class_of
from kltest.scoreboard.upstream import instance, upstream
from kltest.truth import combine

ROWS = [row for row in recorded.read() if row["gradients"] and row["known"]]


def text_of(target):
    name, _, setting = target.partition(":")
    return upstream(find(name), find(name).setting(setting))


def numbers(text):
    """The two last cells of each row of the table of numbers."""
    part = text.partition("**The smallest numbers.**")[2].partition("**A program**")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if re.match(r"\| (nothing|[01])", line)]
    return [tuple(line[-2:]) for line in lines]


def test_one_token_by_hand():
    """p = 0.6, q = 0.4: the reverse KL has p(1 − p) times the difference of log-odds, the forward KL p − q."""
    ((true, followed),) = numbers(text_of("liger:fused/loss_type=dapo"))
    odds = math.log(0.6 / 0.4) - math.log(0.4 / 0.6)
    assert float(true) == pytest.approx(0.6 * 0.4 * odds, abs=1e-6)
    assert float(followed) == pytest.approx(0.6 - 0.4, abs=1e-6)


def test_two_tokens_by_hand():
    """Divided by 2, the next-token part: after nothing it lacks the difference of the KLs that follow."""
    ((true, followed), *later) = numbers(text_of("liger:ppo_loss_fn/loss_type=grpo,use_bias_correction_kl=True"))

    def kl(p, q):
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    own = 0.6 * 0.4 * (math.log(0.6 / 0.4) - math.log(0.4 / 0.6))
    onward = 0.6 * 0.4 * (kl(0.3, 0.5) - kl(0.8, 0.6))
    assert float(true) == pytest.approx(own + onward, abs=1e-6)
    assert float(followed) == pytest.approx(own / 2, abs=1e-6)
    assert all(float(half) == pytest.approx(float(one) / 2, abs=1e-6) for one, half in later)


def test_settings_of_every_class_and_library_have_a_text_if_they_differ():
    written = 0
    for row in {(row["library"], class_of(row), row["reads_sampler"]): row for row in ROWS}.values():
        target = f"{row['library']}:{row['setting']}"
        setting = find(row["library"]).setting(row["setting"])
        alone = [each for each in row["gradients"] if each["batch"] == min(one["batch"] for one in row["gradients"])]
        if setting.recipe or class_of({**row, "gradients": alone}) in ("whole", "on-policy"):
            continue
        text = upstream(find(row["library"]), setting)
        written += 1
        assert not re.search(r"\b(bug|wrong|broken|incorrect|fail)", text.partition("```")[0]), target
        assert row["source"] in text
        code = re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1]
        compile(code, target, "exec")
        assert not re.search(r"^\s*(from|import) kltest", code, re.MULTILINE), target
        length = int(re.search(r"^V, T = 2, (\d)$", code, re.MULTILINE)[1])
        said = numbers(text)
        assert len(said) == 2**length - 1
        truth = combine({"reverse_kl": 1.0}, instance(length))[:, 0]
        assert np.allclose([float(true) for true, _ in said], truth, atol=1e-6)
        assert any(true != followed for true, followed in said), target
    assert written > 20


@pytest.mark.parametrize("target", ["torchrl:loss/SequenceKLGRPOLoss", "trl:rloo/recipe=defaults,on-policy"])
def test_there_is_nothing_to_report_of_what_is_right_or_ours(target):
    with pytest.raises(UsageError, match="nothing to report"):
        text_of(target)
