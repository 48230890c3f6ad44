"""`kltest scan --fix`: a diff with which the term passes, of files that are never run."""

import json

import pytest
from typer.testing import CliRunner
from weekly import first

from kltest.cli import app

LOSS = """open("touched", "w")
KL_COEF = 0.01


def policy_loss(logprobs, ref_logprobs, advantages, mask):
    delta = ref_logprobs - logprobs
    kl = delta.exp() - delta - 1
    loss = (-logprobs * advantages + KL_COEF * kl) * mask
    return loss.sum(-1).mean(), {"kl": (kl * mask).sum().item()}
"""
# A fix that is found soon.
NEGATED = LOSS.replace("delta.exp() - delta - 1", "-0.5 * delta**2").replace("-logprobs * advantages + ", "")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer.py").write_text(LOSS, encoding="utf-8")
    return tmp_path


def scanned(*arguments: str):
    return CliRunner().invoke(app, ["scan", "--no-cache", *arguments])


def diff_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]


@pytest.mark.parametrize(
    ("source", "written"),
    first(1, [(NEGATED, "loss = -((KL_COEF * kl) * mask)"), (LOSS, "0.5 * (logprobs - ref_logprobs) ** 2")]),
    ids=["the sign", "the estimator"],
)
def test_the_diff_keeps_the_coefficient_and_what_is_logged_and_sarif_carries_it(tree, source, written):
    (tree / "trainer.py").write_text(source, encoding="utf-8")
    result = scanned("trainer.py", "--fix", "--output", "text", "--output", "sarif:found.sarif")
    changed = diff_of(result.stdout)
    assert result.exit_code == 1
    assert any(line.startswith("+") and written in line for line in changed)
    removed = [line for line in changed if line.startswith("-")]
    assert not any("return" in line for line in removed)
    assert all("KL_COEF" in line for line in changed if "advantages" in line)
    assert not (tree / "touched").exists()
    sarif = json.loads((tree / "found.sarif").read_text(encoding="utf-8"))
    errors = [one for one in sarif["runs"][0]["results"] if one["level"] == "error"]
    change = errors[0]["fixes"][0]["artifactChanges"][0]
    assert change["artifactLocation"]["uri"] == "trainer.py"
    assert "loss = " in change["replacements"][0]["insertedContent"]["text"]


@pytest.mark.scheduled
def test_a_line_is_fixed_and_passes_then(tree):
    (tree / "trainer.py").write_text(LOSS.replace("-logprobs * advantages + ", ""), encoding="utf-8")
    result = scanned("trainer.py:7", "--fix=apply")
    assert result.exit_code == 1
    assert "was written" in result.stderr
    text = (tree / "trainer.py").read_text()
    assert "surrogate" in text or "0.5 *" in text
    assert "KL_COEF" in text.partition("def ")[2]
    assert scanned("trainer.py").exit_code == 0


def test_a_line_is_needed_to_write(tree):
    result = scanned("trainer.py", "--fix=apply")
    assert result.exit_code == 2
    assert "FILE:LINE" in result.stderr
    assert (tree / "trainer.py").read_text() == LOSS


def test_other_terms_are_not_looked_at_for_a_line(tree):
    assert "no KL term" in scanned("trainer.py:2").stdout or scanned("trainer.py:2").exit_code == 5


def test_what_has_no_fix_is_said(tree):
    source = "def kl_loss(ref_logprobs, logprobs):\n    return (ref_logprobs - logprobs).detach().mean() * 0\n"
    (tree / "trainer.py").write_text(source, encoding="utf-8")
    result = scanned("trainer.py", "--fix", "--output", "json")
    for row in json.loads(result.stdout)["terms"]:
        assert row["fixes"] or row["advice"] or row["status"] != "finding"
