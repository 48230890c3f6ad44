"""Real libraries, installed and measured by `kltest libraries`, are what is recorded of them.

Every setting of every library is measured, in hours; `test_libraries.py` measures one that is made there.
"""

import json

import pytest

from kltest.adapters import NAMES, find
from kltest.cli.libraries import Measurement, libraries
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import install
from kltest.scoreboard.releases import UnreachableError
from kltest.scoreboard.rows import changes

UNNAMED = "its gradient is unnamed, so there is nothing to compare it with"


@pytest.mark.real
@pytest.mark.scheduled
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_what_is_recorded(name, tmp_path):
    """It is skipped only if no package index answers."""
    library = find(name)
    try:
        install(library, library.version)
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached, so {name} was not measured: {error}")
    assert libraries([name], request=Measurement(), output=str(tmp_path)) == 0
    lines = (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    of_library = [row for row in recorded.read() if (row["library"], row["version"]) == (name, library.version)]
    assert {row["setting"] for row in rows} == {row["setting"] for row in of_library} != set()
    assert changes(of_library, rows) == []
    notes = {row["program_note"] for row in rows}
    assert notes <= {"", UNNAMED}, "each program prints what was found, if that has a name"
