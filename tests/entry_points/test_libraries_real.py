"""Real libraries, installed and measured by `kltest libraries`, are what is recorded of them.

Two that need torch alone are installed without dependencies, in seconds, and measured by a setting of each: a whole
loss and a lifted function, with the programs that show them. With `-m scheduled` every setting of every library is
measured, in hours.
"""

import json

import pytest

from kltest.adapters import NAMES, find
from kltest.cli.libraries import Measurement, libraries
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import install
from kltest.scoreboard.releases import UnreachableError
from kltest.scoreboard.rows import changes

FEW = {
    "liger": ("ppo_loss_fn/loss_type=dapo",),  # a whole loss, of groups, with a clipped ratio
    "openrlhf": ("compute_approx_kl/k3",),  # a function, lifted; its program loads it with placeholders
}

UNNAMED = "its gradient is unnamed, so there is nothing to compare it with"


def measured(name, settings, folder):
    """Measure settings (all if empty) and hold them to the record; skip only if no package index answers."""
    library = find(name)
    try:
        install(library, library.version)
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached, so {name} was not measured: {error}")
    assert libraries([name], request=Measurement(settings=settings), output=str(folder)) == 0
    lines = (folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    of_library = [row for row in recorded.read() if (row["library"], row["version"]) == (name, library.version)]
    expected = set(settings) or {row["setting"] for row in of_library}
    assert {row["setting"] for row in rows} == expected != set()
    assert expected <= {row["setting"] for row in of_library}
    assert changes(of_library, rows, settings) == []
    notes = {row["program_note"] for row in rows}
    assert notes <= {"", UNNAMED}, "each program prints what was found, if that has a name"


@pytest.mark.scheduled
@pytest.mark.real
@pytest.mark.parametrize("name", FEW)
def test_what_is_measured_is_what_is_recorded(name, tmp_path):
    measured(name, FEW[name], tmp_path)


@pytest.mark.real
@pytest.mark.scheduled
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_what_is_recorded(name, tmp_path):
    measured(name, (), tmp_path)
