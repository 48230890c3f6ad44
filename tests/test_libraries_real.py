"""Real libraries, installed and measured by `kltest libraries`, are what is recorded of them.

The three that are quickest to install, beside the running torch: documented defaults, recipes and KL functions alone.
KLTEST_REAL=all measures every setting of all seven, which takes an hour.
"""

from __future__ import annotations

import json
import os

import pytest

from kltest.adapters import NAMES, find
from kltest.cli.libraries import Request, libraries
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import UnreachableError, install
from kltest.scoreboard.rows import changes

ALL = os.environ.get("KLTEST_REAL") == "all"
LIBRARIES = NAMES if ALL else ("liger", "openrlhf", "torchrl")


def asked(name):
    """Settings by which a change of a library would show first; none is all of them."""
    settings = find(name).settings
    quick = [each.name for each in settings if each.default or each.recipe or each.depth == "function"]
    return () if ALL else tuple(quick)


@pytest.fixture(params=LIBRARIES)
def name(request):
    """A library that is installed; only an index that does not answer is a reason to skip."""
    library = find(request.param)
    try:
        install(library, library.version)
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached, so {request.param} was not measured: {error}")
    return request.param


@pytest.mark.real
def test_what_is_measured_is_what_is_recorded(name, tmp_path):
    settings = asked(name)
    assert libraries([name], request=Request(settings=settings), output=str(tmp_path)) == 0
    lines = (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    measured = [row for line in lines for row in json.loads(line)["rows"]]
    of_library = [row for row in recorded.read() if (row["library"], row["version"]) == (name, find(name).version)]
    expected = set(settings) or {row["setting"] for row in of_library}
    assert {row["setting"] for row in measured} == expected != set()
    assert expected <= {row["setting"] for row in of_library}
    assert changes(of_library, measured, settings) == []
