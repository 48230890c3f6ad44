"""Real libraries, installed and measured by `kltest libraries`, are what is recorded of them.

Three that need torch alone are installed without dependencies, in seconds, and measured by their documented defaults,
recipes and KL functions. With `-m scheduled` every setting of all seven is measured, which takes an hour.
"""

from __future__ import annotations

import json

import pytest

from kltest.adapters import NAMES, find
from kltest.cli.libraries import Request, libraries
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import UnreachableError, install
from kltest.scoreboard.rows import changes

ALONE = ("liger", "openrlhf", "torchrl")


def quick(name):
    """Settings by which a change of a library would show first."""
    settings = find(name).settings
    return tuple(each.name for each in settings if each.default or each.recipe or each.depth == "function")


def measured(name, settings, folder):
    """Measure settings (all if empty) and hold them to the record; skip only if no package index answers."""
    library = find(name)
    try:
        install(library, library.version)
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached, so {name} was not measured: {error}")
    assert libraries([name], request=Request(settings=settings), output=str(folder)) == 0
    lines = (folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    of_library = [row for row in recorded.read() if (row["library"], row["version"]) == (name, library.version)]
    expected = set(settings) or {row["setting"] for row in of_library}
    assert {row["setting"] for row in rows} == expected != set()
    assert expected <= {row["setting"] for row in of_library}
    assert changes(of_library, rows, settings) == []


@pytest.mark.real
@pytest.mark.parametrize("name", ALONE)
def test_what_is_measured_is_what_is_recorded(name, tmp_path):
    measured(name, quick(name), tmp_path)


@pytest.mark.real
@pytest.mark.scheduled
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_what_is_recorded(name, tmp_path):
    measured(name, (), tmp_path)
