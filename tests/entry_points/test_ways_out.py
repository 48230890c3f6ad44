"""The ways out of a failed check are written as they work: on the command line, in pyproject.toml and in Python."""

import json
import shlex

import pytest
from typer.testing import CliRunner

import kltest
from kltest.checks import CHECKS
from kltest.cli import app
from kltest.cli.explain import LOSS, declaration, expectation, explain, libraries, on_ones_own, other_level, serious
from kltest.grading.configuration import read
from kltest.scoreboard import recorded

DECLARED = [check for check in CHECKS.values() if check.declare]
TOKEN_LEVEL = "def kl_penalty(logp, ref_logp):\n    return (logp - ref_logp) ** 2 / 2\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "losses.py").write_text(TOKEN_LEVEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verdict(command):
    first, *arguments = shlex.split(command)
    assert first == "kltest"
    options = ["--environment", "bandit,sequence", "--output", "json"] if arguments[0] == "grade" else []
    done = CliRunner().invoke(app, [*arguments, *options])
    return json.loads(done.stdout)["verdict"] if options else done.exit_code


@pytest.mark.parametrize("ways", [declaration, expectation])
def test_each_place_makes_a_token_level_loss_confirmed(ways, project):
    check = CHECKS["KL201"]
    assert verdict(f"kltest grade {LOSS}") == "refuted"
    written = dict(ways(check))
    assert verdict(written["command line"]) == "confirmed"
    (project / "pyproject.toml").write_text(written["pyproject.toml"])
    assert verdict("kltest grade") == "confirmed"
    scope = {"kltest": kltest}
    exec(TOKEN_LEVEL, scope)
    report = eval(written["Python"].replace("(loss", "(kl_penalty"), scope)
    assert report.verdict == "confirmed"


def test_a_level_is_moved_for_all_targets(project):
    for code, level in (("KL201", "warning"), ("KL502", "error")):
        written = dict(other_level(CHECKS[code]))
        (project / "pyproject.toml").write_text(written["pyproject.toml"])
        assert read(project / "pyproject.toml").options["levels"] == {code: level}
        assert f'levels={{"{code}": "{level}"}}' in written["Python"]


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_every_way_can_be_read(check, project):
    for ways in (declaration(check) if check.declare else (), expectation(check), other_level(check)):
        for place, written in ways:
            if place == "pyproject.toml":
                (project / "pyproject.toml").write_text(written)
                assert read(project / "pyproject.toml").path is not None
            elif place == "Python":
                compile(written, check.code, "exec")
            else:
                assert shlex.split(written)[:3] == ["kltest", "grade", LOSS]
    assert f"--select {check.code}" in dict(on_ones_own(check))["command line"]
    assert serious(check).startswith("A warning: " if check.level == "warning" else "An error: ")
    said = " ".join(explain(check.code).split())
    for part in ("How serious", "Way out 1", "Way out 2", "Way out 3", "See it on your own loss", "Recorded libraries"):
        assert part in said
    assert " ".join(libraries(check).split()) in said


@pytest.mark.parametrize("check", DECLARED, ids=[check.code for check in DECLARED])
def test_the_wrong_loss_follows_what_its_page_says_to_declare(check):
    options = {name: value for name, value in check.options.items() if name != "expect"}
    environment = ("bandit", "sequence")
    report = kltest.grade(check.wrong, **options, expect=check.declare, environment=environment, select="KL1,KL2,KL3")
    assert (report.verdict, [found.code for found in report.errors]) == ("confirmed", [])


def test_the_libraries_are_those_of_the_record():
    rows = recorded.read()
    newest = {row["library"]: row["version"] for row in reversed(rows)}
    for code, check in CHECKS.items():
        of = {row["library"] for row in rows if code in [found["code"] for found in row["failed"]]}
        said = libraries(check)
        named = {name for name in newest if f"{name} {newest[name]} (" in said}
        assert named <= of
    assert "trl" in libraries(CHECKS["KL201"])
    assert any(libraries(check) == "None of the recorded settings." for check in CHECKS.values())
