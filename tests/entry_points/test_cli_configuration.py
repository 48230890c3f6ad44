"""`[tool.kltest]`: defaults and targets from the nearest pyproject.toml, and clear words about a wrong one."""

import json

import pytest
from typer.testing import CliRunner

from kltest.cli import app
from kltest.grading.configuration import nearest

LOSSES = """
def truth(logp, ref_logp, scale=1.0):
    return scale * 0.5 * (logp - ref_logp).sum(-1) ** 2
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "pyproject.toml").write_text(text)
        return tmp_path

    return write


def grade(*arguments):
    result = CliRunner().invoke(app, ["grade", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_targets_and_defaults_are_taken_and_each_target_may_differ(project):
    project(
        """
        [tool.kltest]
        environment = ["bandit"]
        output = ["json"]
        seed = 5
        targets = [
            "losses.py:truth",
            {target = "losses.py:truth", expect = "2*reverse_kl", arg = {scale = 2.0}, seed = 6},
            {target = "losses.py:truth", arg = ["scale=3"]},
        ]
        """
    )
    result = grade()
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [report["verdict"] for report in found] == ["confirmed", "confirmed", "refuted"]
    assert [report["seed"] for report in found] == [5, 6, 5]
    assert [row["environment"] for report in found for row in report["gradients"]] == ["bandit"] * 3
    assert found[2]["gradients"][0]["identified"]["reverse_kl"] == pytest.approx(3, rel=1e-9)


def test_how_much_is_printed_may_be_configured_and_the_command_line_wins(project):
    project('[tool.kltest]\nenvironment = "bandit"\nquiet = true\ntargets = ["losses.py:truth"]\n')
    assert grade().stdout == "CONFIRMED  losses.py:truth: follows ∇KL(π‖ref), as declared\n"
    assert "environment  sampler" in grade("--verbose").stdout


def test_the_command_line_wins_and_its_targets_replace_the_configured(project):
    project('[tool.kltest]\nenvironment = "mdp"\nseed = 5\ntargets = ["no-such-name"]\n')
    result = grade("losses.py:truth", "--environment", "bandit", "--output", "json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["seed"] == 5
    assert [row["environment"] for row in found["gradients"]] == ["bandit"]


def test_the_nearest_file_is_found_from_below_and_paths_are_relative_to_it(project, monkeypatch):
    folder = project('[tool.kltest]\nenvironment="bandit"\noutput="json:out.json"\ntargets=["losses.py:truth"]\n')
    (folder / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(folder / "deep" / "er")
    assert grade().exit_code == 0
    assert json.loads((folder / "out.json").read_text())["target"] == str(folder / "losses.py:truth")


@pytest.mark.parametrize(
    "text", ["", "[project]\nname='x'\n", "[tool.kltest]\nseed = 1\n", "[tool.kltest]\ntargets=[]"]
)
def test_without_targets_there_is_nothing_to_grade(project, text):
    project(text)
    result = grade()
    assert result.exit_code == 5
    assert "pyproject.toml" in result.stderr


def test_other_tools_settings_are_left_alone(project):
    folder = project("[tool.ruff]\nline-length = 3\n")
    assert dict(nearest(folder).options) == {}
