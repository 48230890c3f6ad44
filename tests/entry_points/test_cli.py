"""The command line: every exit code, every bad input answered with one message, nothing lost, nothing heavy loaded."""

import errno
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import jsonschema
import pytest
import typer
from called import WRITTEN
from doors import GRADED, SCHEMA, call, canned, graded
from processes import ran, until
from weekly import first

from kltest import __version__
from kltest.checks import CHECKS
from kltest.cli.application import COMMANDS
from kltest.estimators import registry
from kltest.grading import jobs
from kltest.truth import ATLAS, FURTHER, OF_POLICY, of_group

LOSSES = (WRITTEN / "misbehaving.py").read_text(encoding="utf-8")
BANDIT = ("--environment", "bandit")


def line_of(text):
    return LOSSES.splitlines().index(text) + 1


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the losses above, in which kltest is called."""
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        (["confirmed"], 0),
        (["confirmed", "inconclusive"], 4),
        (["inconclusive", "refuted", "confirmed"], 1),
        (["refuted", "error", "inconclusive"], 3),
    ],
)
def test_the_worst_counts_and_reports_come_in_the_order_of_their_targets(kinds, code, monkeypatch):
    """Error before refuted before inconclusive; children end in any order."""
    monkeypatch.setattr(GRADED, lambda jobs, *others: reversed(list(canned(*kinds)(jobs))))
    call("grade", *(f"t{number}" for number in range(len(kinds))), "--output", "json:out.json", code=code)
    found = json.loads(Path("out.json").read_text())
    assert [report["verdict"] for report in (found if kinds[1:] else [found])] == kinds


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("raises", r"losses.py:\d+, in helper(.|\n)*the user's own words"),
        ("leaves", "exit status 7"),
        ("exhausts", "memory"),
        ("asks", "EOF"),
    ],
)
def test_a_loss_that_fails_is_3_with_one_message(loss, says):
    found = graded(f"losses.py:{loss}", *BANDIT, "--timeout", "40", code=3)
    assert found["verdict"] == "error"
    assert re.search(says, found["error"])
    assert f"losses.py:{loss}" in found["error"]
    assert "site-packages" not in found["error"]
    # Its last lines are shown.
    assert any("last words" in note for note in found["notes"]) == (loss == "leaves")


@pytest.fixture
def hurried(monkeypatch):
    """A child that does not report by itself when its time is over is ended sooner than it usually is."""
    monkeypatch.setattr(jobs, "TO_REPORT", 1.0)


@pytest.mark.parametrize("loss", first(1, ["never", "floods"]))
def test_a_loss_that_never_returns_is_ended_in_time_and_says_where_it_was(loss, hurried):
    started = time.monotonic()
    found = graded(f"losses.py:{loss}", *BANDIT, "--timeout", "2", code=3)
    assert "did not return within 2 s" in found["error"]
    assert f"in {loss} at" in found["error"]
    # Twice the timeout at most (finding the target, calling it), and what torch takes to load.
    assert time.monotonic() - started < 30


def timed_out(loss, seconds, code):
    """The report, which holds to the schema, and what GitHub is told."""
    to = ("--output", "json:report.json", "--output", "github")
    result = call("grade", f"losses.py:{loss}", "--timeout", str(seconds), *to, code=code)
    found = json.loads(Path("report.json").read_text())
    jsonschema.validate(found, SCHEMA)
    return found, result.stdout


@pytest.mark.scheduled
def test_a_slow_loss_keeps_what_was_reached_and_says_what_was_not():
    found, _ = timed_out("slow", 5, 4)  # on a busy machine two seconds are over before the first environment
    assert (found["verdict"], found["error"]) == ("inconclusive", "")
    said = found["unfinished"]
    calls, seconds = re.search(r"(\d+) calls of ([\d.]+) s each", said).groups()
    assert 0 < int(calls) == found["calls"] <= 5 / 0.02
    assert float(seconds) >= 0.02  # that of the sleep, and what a busy machine adds
    assert f"losses.py:{line_of('def slow(logp, ref_logp, mask):')}" in said
    measured, left = re.search("measured: (.*); not reached: (.*)", said).groups()
    assert measured.startswith("bandit (current)")
    assert {f"{row['environment']} ({row['sampler']})" for row in found["gradients"]} == set(measured.split(", "))
    assert left.endswith("checks")
    assert all(row["agrees"] for row in found["gradients"])
    assert [check["message"] for check in found["checks"]][-1] == "not reached within 5 s"


@pytest.mark.scheduled
def test_a_slow_loss_that_is_wrong_in_what_was_reached_is_refuted():
    found, _ = timed_out("slow_and_wrong", 5, 1)
    assert found["unfinished"]
    assert {row["agrees"] for row in found["gradients"]} == {False}


@pytest.mark.scheduled
def test_a_loss_that_hangs_in_one_branch_keeps_the_rows_before(hurried):
    found, shown = timed_out("deaf_in_a_branch", 2, 3)
    assert found["verdict"] == "error"
    assert "did not return within 2 s (--timeout)" in found["error"]
    line = line_of("        time.sleep(300)")
    assert f"in deaf_in_a_branch at {Path.cwd() / 'losses.py'}:{line}" in found["error"]
    assert [row["environment"] for row in found["gradients"]] == ["bandit"]
    assert f"::error file=losses.py,line={line}," in shown


@pytest.mark.scheduled
def test_a_file_that_is_slow_to_import_is_named_at_its_line(folder):
    (folder / "slow_import.py").write_text("import time\ntime.sleep(300)\ndef f(logp, ref_logp): return logp\n")
    error = graded("slow_import.py:f", "--timeout", "1", code=3)["error"]
    assert "did not return within 1 s (--timeout), in <module> at" in error
    assert "slow_import.py:2" in error


def test_what_a_loss_prints_stays_out_of_the_report_but_is_counted():
    found = graded("losses.py:prints", *BANDIT, code=0)
    assert any("printed" in note for note in found["notes"])
    assert "to standard output" not in json.dumps(found)


@pytest.mark.scheduled
def test_the_first_screen_is_short_and_the_rest_is_there_when_it_is_requested():
    short = call("grade", "losses.py:k3", *BANDIT).stdout
    assert len(short.splitlines()) <= 25
    assert "def " not in short
    whole = call("grade", "losses.py:k3", *BANDIT, "--verbose").stdout
    assert whole.splitlines()[:5] == short.splitlines()[:5]
    for part in ("environment  sampler", "def squared_sum", "smallest environment in which it fails", "skipped:"):
        assert part in whole
        assert part not in short
    lines = call("grade", "losses.py:k3", "losses.py:truth", *BANDIT, "-q").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["REFUTED  losses.py", "CONFIRMED  losses.py"]


@pytest.mark.parametrize("given", [[], ["--output", "html:page.html"]])
@pytest.mark.parametrize("starts", [True, False])
def test_a_report_is_opened_as_a_page(given, starts, monkeypatch, folder):
    opened = []
    monkeypatch.setattr(GRADED, canned("refuted"))
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or starts)
    result = call("grade", "one", "--open", *given, code=1)
    page = Path(url2pathname(urlparse(opened[0]).path))
    assert "<html" in page.read_text("utf-8")
    assert (page == folder / "page.html") is bool(given)
    assert ("no browser could be started" in result.stderr) is not starts
    call("grade", "one", "--open", "--seed", "x", code=2)
    assert len(opened) == 1


def without_a_folder(jobs, *others):
    """A file takes the place of a report's folder while losses are graded."""
    Path("gone").rmdir()
    Path("gone").touch()
    yield from canned()(jobs)


def broken(jobs, *others):
    raise ZeroDivisionError("planted")
    yield


def interrupted(jobs, *others):
    yield next(canned()(jobs))
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("grading", "code", "says", "written"),
    [
        (without_a_folder, 3, "gone/a.json: ", ["one", "two"]),
        (interrupted, 130, "1 of 2 graded, not graded: two", ["one"]),
        (broken, 3, "bug in kltest", []),
    ],
)
def test_what_is_finished_is_written_whatever_happens(grading, code, says, written, monkeypatch, folder):
    (folder / "gone").mkdir()
    monkeypatch.setattr(GRADED, grading)
    result = call("grade", "one", "two", "--output", "json:gone/a.json", "--output", "json:out.json", code=code)
    assert says in result.stderr
    found = json.loads((folder / "out.json").read_text()) if written else []
    assert [report["target"] for report in (found if isinstance(found, list) else [found])] == written
    if trace := re.search("the traceback in (.*)", result.stderr):
        assert "ZeroDivisionError: planted" in Path(trace[1]).read_text()
        Path(trace[1]).unlink()


def test_an_earlier_report_stays_if_there_is_no_room_for_the_new_one(monkeypatch, folder):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (folder / "out.json").write_text("earlier")
    monkeypatch.setattr(GRADED, canned())
    monkeypatch.setattr(os, "fsync", full)
    result = call("grade", "one", "--output", "json:out.json", code=3)
    assert result.stderr == "kltest: the report is not written: cannot write out.json: No space left on device\n"
    assert sorted(path.name for path in folder.iterdir()) == ["losses.py", "out.json"]
    assert (folder / "out.json").read_text() == "earlier"


@pytest.mark.skipif(sys.platform != "linux", reason="only a forked child sees the planted bug")
def test_a_bug_of_kltest_in_the_child_says_so_and_spares_the_other_targets(monkeypatch):
    def broken(grading, loss):
        if "truth" in loss.name:
            raise ZeroDivisionError("planted")
        grading.blank, grading.finished = replace(grading.blank, verdict="confirmed"), True
        yield

    monkeypatch.setattr("kltest.grading.grader.Grading.steps", broken)
    found = graded("losses.py:truth", "losses.py:k3", *BANDIT, code=3)
    assert "bug in kltest" in found[0]["error"]
    assert found[1]["verdict"] == "confirmed"
    os.unlink(found[0]["error"].split("the traceback in ")[1])


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.scheduled
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_children_and_keeps_what_is_finished(folder, number):
    (folder / "slow.py").write_text(
        "import os, time\ndef f(logp):\n    open('started', 'w').write(str(os.getpid()))\n    time.sleep(300)\n"
    )
    command = [sys.executable, "-m", "kltest.cli", "grade", "losses.py:truth", "slow.py:f", "--environment", "bandit"]
    # On one core, so that the first is finished before the second is begun.
    one = {min(os.sched_getaffinity(0))} if hasattr(os, "sched_setaffinity") else set()
    process = subprocess.Popen(
        [*command, "--output", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=(lambda: os.sched_setaffinity(0, one)) if one else None,
    )
    until(lambda: process.poll() is not None or ((folder / "started").exists() and (folder / "started").read_text()))
    assert process.poll() is None, process.stderr.read()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert b"not graded: slow.py:f" in err
    assert json.loads(out)["target"] == "losses.py:truth"
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "started").read_text()), 0)


def test_list_shows_everything_there_is():
    text = call("list").stdout
    assert all(name in text for name in [*registry(), *ATLAS, *CHECKS, "bandit", "sequence", "ragged", "mdp"])
    listed = json.loads(call("list", "--json").stdout)
    assert [entry["name"] for entry in listed["estimators"]] == list(registry())
    assert [entry["name"] for entry in listed["gradients"]] == [*ATLAS, *FURTHER, *OF_POLICY, *of_group(4)]
    assert [entry["code"] for entry in listed["checks"]] == list(CHECKS)
    environments = {entry["name"]: entry for entry in listed["environments"]}
    # V^T sequences; with an end token, Σ_{t<T} 2^(t−1) that end early and 2²·3 that reach the end.
    assert environments["bandit"]["rollouts"] == 4
    assert environments["sequence"]["rollouts"] == 3**3
    assert environments["ragged"]["rollouts"] == 1 + 2 + 2**2 * 3


def test_version_and_help():
    assert call("--version").stdout == f"kltest {__version__}\n"
    listed = call("--help", code=0).stdout
    for command in COMMANDS:
        call(command, "--help", code=0)
        assert command in listed


@pytest.mark.parametrize(("module", "name"), [(module, name) for name, (module, _) in COMMANDS.items()])
def test_no_option_may_take_its_name_from_its_metavar(module, name):
    """Typer 0.27 does where both have the same letters: `--MODEL`."""
    found = vars(importlib.import_module(f"kltest.cli.{module}"))
    parameters = inspect.signature(found.get("command") or found[name], eval_str=True).parameters.values()
    for one in parameters:
        for written in getattr(one.annotation, "__metadata__", ()):
            if isinstance(written, typer.models.OptionInfo) and (written.metavar or "").lower() == one.name:
                assert written.default == f"--{one.name}"


@pytest.mark.scheduled
def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m kltest.cli list | head -n 1"
    run = ran("bash", "-c", command, check=True)
    assert run.stdout == "Estimators\n"
    assert run.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", first(1, ["list", "--help", "grade --help"]))
def test_a_full_disk_is_said_and_is_no_bug(arguments):
    command = f"{sys.executable} -m kltest.cli {arguments} > /dev/full"
    run = ran("bash", "-c", command)
    assert run.returncode == 3
    assert run.stderr == "kltest: standard output cannot be written: No space left on device\n"


@pytest.mark.scheduled
@pytest.mark.parametrize("closed", [">&-", "2>&- <&-", ">&- 2>&- <&-"])
def test_closed_streams_are_as_good_as_none(folder, closed):
    """Left closed, the pipes to the process that grades would take the place of standard output."""
    targets = "k1-reward k3-loss --environment bandit --select KL1"
    command = f"{sys.executable} -m kltest.cli grade {targets} --output json:r.json --output text {closed}"
    run = ran("bash", "-c", command)
    assert run.returncode == 1
    assert [report["verdict"] for report in json.loads((folder / "r.json").read_text())] == ["confirmed", "refuted"]
    assert ("2 targets" in run.stdout) == (">&-" not in closed.replace("2>&-", ""))
    assert run.stderr == ""


@pytest.mark.scheduled
def test_a_terminal_that_knows_no_unicode_still_gets_json():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    run = ran(sys.executable, "-m", "kltest.cli", "list", "--json", env=environment, encoding="utf-8", check=True)
    assert json.loads(run.stdout)["gradients"]
