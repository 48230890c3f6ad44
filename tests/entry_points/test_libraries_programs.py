"""Programs without kltest are run before they are given out: as main modules, where there is no kltest."""

import json
import sys

import pytest

from kltest.scoreboard import programs
from kltest.scoreboard.programs import ProgramError

SAID = {
    "vocabulary": 2,
    "length": 1,
    "policy": [[0.5, 0.5]],
    "reference": [[0.4, 0.6]],
    "sampler": None,
    "expected": [[0.1, -0.1]],
}
GOOD = f"""
import json, os, sys, torch
assert __name__ == "__main__" and not any(name.split(".")[0] == "kltest" for name in sys.modules if sys.modules[name])
print("words that come first")
open("left.txt", "w").close()
print(json.dumps(json.loads('{json.dumps(SAID)}')))
"""


@pytest.fixture
def said(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield programs._printed
    assert not list(tmp_path.iterdir())
    assert "kltest" in sys.modules
    assert sys.modules["kltest"] is not None
    assert {name for name in before if name.startswith("kltest")} <= set(sys.modules)


def test_what_is_printed_last_is_read(said):
    assert said(GOOD) == SAID


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "the standalone program failed"),
        ("print('no JSON')", "does not end with its JSON object: no JSON"),
        ("pass", "does not end with its JSON object: nothing"),
        ("print('{}')", "does not end with its JSON object: {}"),
        ("print('[]')", "does not end with its JSON object"),
    ],
)
def test_what_goes_wrong_is_said(said, code, words):
    with pytest.raises(ProgramError, match=words):
        said(code)


def test_a_program_that_needs_kltest_fails_in_a_fork_of_a_process_that_has_it():
    with pytest.raises(ProgramError, match="kltest"):
        programs._printed(f"import kltest\nprint({json.dumps(SAID)!r})")


@pytest.mark.parametrize(
    ("code", "words"), [("import os; os._exit(4)", "exit status 4"), ("while True: pass", "did not")]
)
def test_a_program_that_leaves_or_never_ends_is_ended(monkeypatch, code, words):
    monkeypatch.setattr(programs, "SECONDS", 1.0)
    with pytest.raises(ProgramError, match=words):
        programs._printed(code)
