"""Real libraries, installed and measured by `kltest libraries`, are what is recorded of them.

Two that need torch alone are installed without dependencies, in seconds, and measured by a setting of each: a whole
loss and a lifted function. With `-m scheduled` every setting of every library is measured, in hours, and the programs
of three reports are run.
"""

import json
import re

import pytest
from processes import ran

from kltest.adapters import NAMES, find
from kltest.cli.libraries import Request, libraries
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import install
from kltest.scoreboard.releases import UnreachableError
from kltest.scoreboard.rows import changes
from kltest.scoreboard.upstream import upstream

FEW = {
    "liger": ("ppo_loss_fn/loss_type=dapo",),  # a whole loss, of groups, with a clipped ratio
    "openrlhf": ("compute_approx_kl/k3",),  # a function, lifted; its program loads it with placeholders
}


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
@pytest.mark.parametrize("name", FEW)
def test_what_is_measured_is_what_is_recorded(name, tmp_path):
    measured(name, FEW[name], tmp_path)


REPORTED = {
    "liger": "ppo_loss_fn/loss_type=grpo,use_bias_correction_kl=True",  # two tokens, by the law of its coefficient
    "openrlhf": "compute_approx_kl/k3",  # one token
    "torchrl": "kl_in_reward/KLComputation",  # rollouts of another policy
}


@pytest.mark.real
@pytest.mark.scheduled
@pytest.mark.parametrize("name", REPORTED)
def test_the_program_of_a_report_prints_the_numbers_of_its_table(name):
    library = find(name)
    try:
        there = install(library, library.version)
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached: {error}")
    text = upstream(library, library.setting(REPORTED[name]))
    (program, *_) = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    done = ran(*there.command("-c", program), env=there.environment, check=True)
    printed = json.loads(done.stdout.splitlines()[-1])
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| (nothing|[01])", line)]
    assert len(rows) == len(printed["expected"]) == 2 ** printed["length"] - 1
    for row, true, expected in zip(rows, printed["true"], printed["expected"], strict=True):
        assert [float(cell) for cell in row[-2:]] == pytest.approx([true[0], expected[0]], abs=2e-6)


@pytest.mark.real
@pytest.mark.scheduled
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_what_is_recorded(name, tmp_path):
    measured(name, (), tmp_path)
