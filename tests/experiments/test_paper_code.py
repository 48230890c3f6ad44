"""The code that the paper prints follows what stands beside it."""

import re
import textwrap
from pathlib import Path

import pytest
from weekly import first

import kltest

SECTIONS = Path(__file__).parents[2] / "paper" / "sections"
LINES = re.findall(r'raw\("(loss = [^"]+)"', (SECTIONS / "training.typ").read_text(encoding="utf-8"))
FOLLOWED = ("zero", "local_forward_kl", "last_token_reverse_kl", "local_reverse_kl", "reverse_kl")


def written(code, parameters):
    """A loss made of lines of code that end with an assignment to `loss`."""
    made = {}
    exec(f"def loss({parameters}):\n    u = logp - ref_logp\n{textwrap.indent(code, '    ')}\n    return loss\n", made)
    return made["loss"]


@pytest.mark.parametrize(("code", "followed"), first(2, [*zip(LINES, FOLLOWED, strict=True)]), ids=FOLLOWED)
def test_wrong_and_right_lines(code, followed):
    report = kltest.grade(written(code, "logp, ref_logp, beta"), environment="sequence")
    assert report.gradients[0].identified == pytest.approx({followed: 1.0})


def blocks():
    """The recommended lines; those for stale samples, which go on from the advantage; and the token's ratio instead."""
    text = (SECTIONS / "recommendations.typ").read_text(encoding="utf-8")
    fresh, stale = map(textwrap.dedent, re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    advantage = fresh.partition("loss =")[0]
    weight, whole, token = stale.splitlines(keepends=True)
    return fresh, advantage + weight + whole, advantage + token


@pytest.mark.scheduled
def test_the_recommended_lines_are_confirmed():
    code, _, _ = blocks()
    parameters = "logp, ref_logp, reward, mask, beta, n=2"
    assert kltest.grade(written(code, parameters), group_size=2, batch_size=2).verdict == "confirmed"
    wrong = code.replace(".sum(1)).mean()", ".mean(1)).mean()")
    assert kltest.grade(written(wrong, parameters), group_size=2, batch_size=2).verdict == "refuted"


@pytest.mark.parametrize("part", first(1, ["all", "kl"]))
def test_one_ratio_is_right_for_stale_samples_if_the_baseline_has_it_and_the_tokens_keeps_the_prefixes(part):
    _, code, token = blocks()
    asked = {"sampler": "stale", "part": part, "group_size": 2, "batch_size": 2}
    parameters = "logp, ref_logp, old_logp, reward, mask, beta, n=2"
    assert kltest.grade(written(code, parameters), **asked).verdict == "confirmed"
    alone = code.replace("w * advantage", "(w * ret.view(-1) - ret.view(-1) + advantage)")
    assert kltest.grade(written(alone, parameters), **asked).verdict == "refuted"
    found = kltest.grade(written(token, parameters), environment="sequence", **asked).gradients[0].identified
    assert (
        found.keys() == {"kl": {"reverse_kl@sampler"}, "all": {"reverse_kl@sampler", "expected_reward@sampler"}}[part]
    )
