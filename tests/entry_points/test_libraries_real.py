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
from kltest.scoreboard.rows import PARTS, changes

UNNAMED = "its gradient is unnamed, so there is nothing to compare it with"


@pytest.mark.real
@pytest.mark.scheduled
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_what_is_recorded(name, part, tmp_path):
    """It is skipped only if no package index answers, or nothing is recorded of a part."""
    library = find(name)
    known = recorded.read(parts=[part])
    of_library = [row for row in known if (row["library"], row["version"]) == (name, library.version)]
    settings = tuple(dict.fromkeys(row["setting"] for row in of_library))
    if not settings:
        pytest.skip(f"nothing is recorded of the part {part} of {name}")
    try:
        install(library, library.version)
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached, so {name} was not measured: {error}")
    request = Measurement(settings=() if part == "kl" else settings, part=part)
    assert libraries([name], request=request, output=str(tmp_path)) == 0
    lines = (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    assert {row["setting"] for row in rows} == {*settings}
    assert changes(of_library, rows) == []
    notes = {row.get("program_note", "") for row in rows}
    assert notes <= {"", UNNAMED}, "each program prints what was found, if that has a name"
