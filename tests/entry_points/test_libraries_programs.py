"""Programs without kltest are run before they are given out: as main modules, where there is no kltest."""

import sys

import pytest

from kltest.scoreboard import programs
from kltest.scoreboard.programs import ProgramError

GOOD = """
import json, os, sys, torch
assert __name__ == "__main__" and not any(name.split(".")[0] == "kltest" for name in sys.modules if sys.modules[name])
print("words that come first")
open("left.txt", "w").close()
print([[0.1, -0.1]])
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
    assert said(GOOD).tolist() == [[0.1, -0.1]]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "the standalone program failed"),
        ("print('no numbers')", "does not end with its gradient: no numbers"),
        ("pass", "does not end with its gradient: nothing"),
        ("print('{}')", "does not end with its gradient: {}"),
    ],
)
def test_what_goes_wrong_is_said(said, code, words):
    with pytest.raises(ProgramError, match=words):
        said(code)


def test_a_program_that_needs_kltest_fails_in_a_fork_of_a_process_that_has_it():
    with pytest.raises(ProgramError, match="kltest"):
        programs._printed("import kltest\nprint([[0.1, -0.1]])")


@pytest.mark.parametrize(
    ("code", "words"), [("import os; os._exit(4)", "exit status 4"), ("while True: pass", "did not")]
)
def test_a_program_that_leaves_or_never_ends_is_ended(monkeypatch, code, words):
    monkeypatch.setattr(programs, "SECONDS", 1.0)
    with pytest.raises(ProgramError, match=words):
        programs._printed(code)
