"""The linter, the formatter and the type checker have nothing to say."""

import sys
from pathlib import Path

import pytest
from processes import ran

ROOT = Path(__file__).resolve().parents[2]


MYPY = pytest.param(["mypy"], marks=pytest.mark.scheduled)  # on every push it is a job of its own


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], MYPY], ids=" ".join)
def test_nothing_to_say(command):
    done = ran(sys.executable, "-m", *command, cwd=ROOT, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
