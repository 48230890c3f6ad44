"""`--cache` of `kltest grade` and its key: accepted for one release, without effect, and said so once."""

import json

import pytest
from typer.testing import CliRunner

from kltest.cli import app

GRADE = ("grade", "k3-loss", "--environment", "bandit", "--select", "KL1", "--output", "json")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ((), "", []),
        (("--cache",), "", ["--cache"]),
        (("--no-cache",), "", ["--no-cache"]),
        ((), "cache = true", ["line 2: cache"]),
    ],
)
def test_it_changes_nothing_and_says_so(options, key, said, folder):
    (folder / "pyproject.toml").write_text(f"[tool.kltest]\n{key}\n")
    done = CliRunner().invoke(app, [*GRADE, *options])
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "refuted")
    lines = done.stderr.splitlines()
    assert len(lines) == len(said)
    assert all(words in line and "has no effect" in line for words, line in zip(said, lines, strict=True))


def test_a_wrong_value_of_the_key_is_still_refused(folder):
    (folder / "pyproject.toml").write_text("[tool.kltest]\ncache = 3\n")
    assert CliRunner().invoke(app, GRADE).exit_code == 2
