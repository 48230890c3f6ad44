"""`kltest grade --cache`: what has not changed is not graded again, and whatever a report depends on is a change."""

import json
import os

import pytest
from typer.testing import CliRunner

from kltest.cli import app
from kltest.grading import cache, jobs

LOSS = """
import torch
from parts import half

def k2(logp, ref_logp):
    return half() * (logp - ref_logp) ** 2

def fails(logp):
    raise ValueError("planted")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLTEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "parts.py").write_text("def half():\n    return 0.5\n")
    (tmp_path / "loss.py").write_text(LOSS)
    return tmp_path


def grade(*more, target="loss.py:k2", code=1):
    arguments = ("grade", target, "--environment", "bandit,sequence", "--select", "KL1", "--output", "json")
    done = CliRunner().invoke(app, [*arguments, "--cache", *more])
    assert done.exit_code == code, done.output
    return done.stdout, "has not changed" in done.stderr


def test_an_unchanged_target_is_not_graded_again_and_its_report_is_the_same(monkeypatch):
    first, cached = grade()
    assert not cached
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "Child", None)
        assert grade() == (first, True)
    assert grade("--no-cache") == (first, False)


def test_whatever_a_report_depends_on_is_a_change(folder, monkeypatch):
    grade()
    assert not grade("--seed", "1")[1]
    (folder / "parts.py").write_text("def half():\n    return 2 / 2\n")
    again, cached = grade()
    assert not cached, "a helper that the loss imports has changed"
    assert json.loads(again)["gradients"][0]["identified"] == {"reverse_kl": pytest.approx(2.0)}
    assert grade()[1]
    (folder / "loss.py").write_text(LOSS + "\n# the same\n")
    assert not grade()[1]
    with monkeypatch.context() as patch:
        patch.setattr(cache, "installation", lambda: "another torch")
        assert not grade()[1]
    grade()
    for entry in (folder / "cache").iterdir():
        entry.write_bytes(entry.read_bytes()[:-9])
    assert not grade()[1], "half an entry is none"


def test_what_failed_is_graded_again_and_what_cannot_be_kept_is_said(folder):
    for _ in range(2):
        assert not grade(target="loss.py:fails", code=3)[1]
    assert not (folder / "cache").exists()
    (folder / "cache").write_text("not a folder")
    for _ in range(2):
        done = CliRunner().invoke(app, ["grade", "loss.py:k2", "--environment", "bandit", "--select", "KL1", "--cache"])
        assert done.exit_code == 0
        assert "CONFIRMED" in done.stdout
        assert "is not kept for --cache: cannot write" in done.stderr


def test_the_configuration_turns_it_on(folder):
    (folder / "pyproject.toml").write_text("[tool.kltest]\ncache = true\n")
    arguments = ["grade", "loss.py:k2", "--environment", "bandit", "--select", "KL1", "-q"]
    for expected in (False, True):
        done = CliRunner().invoke(app, arguments)
        assert ("has not changed" in done.stderr) is expected
    (folder / "pyproject.toml").write_text("[tool.kltest]\ncache = 3\n")
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_reports_stand_in_the_order_of_the_targets_and_a_slow_one_holds_no_other_up(folder):
    (folder / "slow.py").write_text("import time\n" + LOSS.replace("return half", "time.sleep(0.02); return half"))
    arguments = ["grade", "slow.py:k2", "loss.py:k2", "--environment", "bandit", "--select", "KL1", "--output", "json"]
    done = CliRunner().invoke(app, arguments)
    assert [report["target"] for report in json.loads(done.stdout)] == ["slow.py:k2", "loss.py:k2"]
    if len(os.sched_getaffinity(0)) > 1:
        given = [jobs.Job(name, name, {"environment": ("bandit",), "select": ("KL1",)}) for name in arguments[1:3]]
        assert [one.number for one in jobs.graded(given)] == [1, 0]
