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


def test_the_recommended_lines_are_confirmed():
    text = (SECTIONS / "recommendations.typ").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    loss = written(textwrap.dedent(code), "logp, ref_logp, reward, mask, beta, n=2")
    assert kltest.grade(loss, group_size=2, batch_size=2).verdict == "confirmed"
    wrong = written(
        textwrap.dedent(code).replace(".sum(1)).mean()", ".mean(1)).mean()"), "logp, ref_logp, reward, mask, beta, n=2"
    )
    assert kltest.grade(wrong, group_size=2, batch_size=2).verdict == "refuted"
