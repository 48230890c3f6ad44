"""The command line: every exit code, every bad input answered with one message, nothing lost, nothing heavy loaded."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import typer.main
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kltest import __version__
from kltest.checks import CHECKS
from kltest.cli import app
from kltest.cli import grade as grade_command
from kltest.cli.application import COMMANDS
from kltest.estimators import registry
from kltest.grading import jobs
from kltest.grading.jobs import Graded
from kltest.report import Report
from kltest.truth import ATLAS

SCHEMA = json.loads((files("kltest.render") / "grade-2.schema.json").read_text(encoding="utf-8"))
LOSSES = """
import ctypes, os, signal, sys, time
import torch

def truth(logp, ref_logp):
    return 0.5 * (logp - ref_logp).sum(-1) ** 2

def k3(logp, ref_logp):
    u = logp - ref_logp
    return torch.exp(-u) - 1 + u

def coupled(logp, ref_logp):
    u = (logp - ref_logp).sum(-1)
    return 0.5 * (u * u.roll(1)).mean() + torch.cos(u).prod()

def unfillable(logp, banana):
    return logp

def detached(logp, ref_logp):
    return (logp - ref_logp).detach()

def raises(logp):
    helper(logp)

def helper(logp):
    raise ValueError("the user's own words")

def prints(logp, ref_logp):
    print("to standard output")
    print("to standard error", file=sys.stderr)
    os.write(1, b"below Python\\n")
    return truth(logp, ref_logp)

def slow(logp, ref_logp, mask):
    time.sleep(0.02)
    return 0.5 * (logp - ref_logp).where(mask != 0, 0.0).sum(-1) ** 2

def slow_and_wrong(logp, ref_logp, mask):
    time.sleep(0.02)
    return (logp - ref_logp).where(mask != 0, 0.0)

def sleeps_in_a_branch(logp, ref_logp):
    if len(logp) == 2 and logp.shape[1] == 3:
        time.sleep(300)
    return 0.5 * (logp - ref_logp).sum(-1) ** 2

def deaf_in_a_branch(logp, ref_logp):
    if len(logp) == 2 and logp.shape[1] == 3:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(300)
    return 0.5 * (logp - ref_logp).sum(-1) ** 2

def floods(logp):
    while True:
        print("x" * 1000)

def never(logp):
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass

def leaves(logp):
    os._exit(7)

def exits(logp):
    sys.exit(7)

def crashes(logp):
    ctypes.string_at(0)

def exhausts(logp):
    return torch.zeros(10**14)

def is_killed(logp):
    os.kill(os.getpid(), 9)

def closes_everything(logp):
    os.closerange(3, 256)
    time.sleep(60)

def asks(logp):
    return logp * float(input())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder with the losses above, in which kltest is called."""
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = typer.main.get_command(app)


def call(*arguments):
    result = CliRunner().invoke(COMMAND, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def graded(*arguments, code=None):
    """The JSON of a quick grading, which holds to the schema."""
    result = call("grade", *arguments, "--environment", "bandit", "--output", "json")
    assert code is None or result.exit_code == code, result.output
    found = json.loads(result.stdout)
    jsonschema.validate(found, SCHEMA)
    return found


def refused(*arguments, saying):
    """A usage error: exit 2, one message that says it, nothing on standard output."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    for words in [saying] if isinstance(saying, str) else saying:
        assert words in result.stderr
    return result


def test_of_several_targets_the_worst_counts_and_all_are_reported_in_order():
    targets = ["losses.py:truth", "losses.py:k3", "losses.py:leaves"]
    found = graded(*targets, code=3)
    assert [report["target"] for report in found] == targets
    assert [report["verdict"] for report in found] == ["confirmed", "refuted", "error"]
    assert [report["verdict"] for report in graded(*targets[:2], code=1)] == ["confirmed", "refuted"]


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        (["confirmed"], 0),
        (["confirmed", "inconclusive"], 4),
        (["inconclusive", "refuted", "confirmed"], 1),
        (["refuted", "error", "inconclusive"], 3),
    ],
)
def test_the_worst_is_error_then_refuted_then_inconclusive(kinds, code, monkeypatch):
    monkeypatch.setattr(grade_command, "graded", canned(kinds))
    assert call("grade", *(f"t{number}" for number in range(len(kinds)))).exit_code == code


def canned(verdicts):
    def reports(jobs, **options):
        for number, (job, verdict) in enumerate(zip(jobs, verdicts, strict=False)):
            report = Report(job.name, "reverse_kl", "loss", 0, {}, verdict, "per-row", "float64", error="x")
            yield Graded(number, report, "value")

    return reports


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("raises", "the user's own words"),
        ("exits", "7"),
        ("leaves", "exit status 7"),
        ("crashes", "SIGSEGV"),
        ("exhausts", "memory"),
        ("is_killed", "memory ran out"),
        ("closes_everything", "cut its connection"),
        ("asks", "EOF"),
    ],
)
def test_a_loss_that_fails_is_3_with_one_message(loss, says):
    found = graded(f"losses.py:{loss}", "--timeout", "40", code=3)
    assert found["verdict"] == "error"
    assert re.search(says, found["error"])
    assert f"losses.py:{loss}" in found["error"]


def test_a_loss_that_raises_shows_the_users_own_line():
    line = LOSSES.splitlines().index('    raise ValueError("the user\'s own words")') + 1
    result = call("grade", "losses.py:raises", "--environment", "bandit")
    assert f"losses.py:{line}, in helper" in result.stdout
    assert "site-packages" not in result.stdout


@pytest.fixture
def hurried(monkeypatch):
    """A child that does not report by itself when its time is over is ended sooner than it usually is."""
    monkeypatch.setattr(jobs, "TO_REPORT", 1.0)


@pytest.mark.parametrize("loss", ["never", "floods"])
def test_a_loss_that_never_returns_is_ended_in_time_and_says_where_it_was(loss, hurried):
    started = time.monotonic()
    found = graded(f"losses.py:{loss}", "--timeout", "2", code=3)
    assert "did not return within 2 s" in found["error"]
    assert f"in {loss} at" in found["error"]
    # Twice the timeout at most (finding the target, calling it), and what torch takes to load.
    assert time.monotonic() - started < 30


def line_of(text):
    return LOSSES.splitlines().index(text) + 1


def timed_out(loss, seconds, code):
    """The report, which holds to the schema, and what GitHub is told."""
    to = ("--output", "json:report.json", "--output", "github")
    result = call("grade", f"losses.py:{loss}", "--timeout", str(seconds), *to)
    assert result.exit_code == code, result.output
    found = json.loads(Path("report.json").read_text())
    jsonschema.validate(found, SCHEMA)
    return found, result.stdout


def test_a_slow_loss_keeps_what_was_reached_and_says_what_was_not():
    found, _ = timed_out("slow", 5, 4)  # on a busy machine two seconds are over before the first environment
    assert found["verdict"] == "inconclusive"
    assert found["error"] == ""
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
    text = call("grade", "losses.py:slow", "--timeout", "0.5").stdout
    assert "open      the time was over after 0.5 s (--timeout)" in text


def test_a_slow_loss_that_is_wrong_in_what_was_reached_is_refuted():
    found, _ = timed_out("slow_and_wrong", 5, 1)
    assert found["unfinished"]
    assert {row["agrees"] for row in found["gradients"]} == {False}


@pytest.mark.parametrize("loss", ["sleeps_in_a_branch", "deaf_in_a_branch"])
def test_a_loss_that_hangs_in_one_branch_keeps_the_rows_before(loss, hurried):
    found, shown = timed_out(loss, 2, 3)
    assert found["verdict"] == "error"
    assert "did not return within 2 s (--timeout)" in found["error"]
    sleeps = [number for number, line in enumerate(LOSSES.splitlines(), 1) if line == "        time.sleep(300)"]
    assert any(f"in {loss} at {Path.cwd() / 'losses.py'}:{line}" in found["error"] for line in sleeps)
    assert [row["environment"] for row in found["gradients"]] == ["bandit"]
    assert any(f"::error file=losses.py,line={line}," in shown for line in sleeps)


def test_a_file_that_is_slow_to_import_is_named_at_its_line(folder):
    (folder / "slow_import.py").write_text("import time\ntime.sleep(300)\ndef f(logp, ref_logp): return logp\n")
    found = graded("slow_import.py:f", "--timeout", "1", code=3)
    assert "did not return within 1 s (--timeout), in <module> at" in found["error"]
    assert "slow_import.py:2" in found["error"]


def test_what_a_loss_prints_stays_out_of_the_report_but_is_counted():
    found = graded("losses.py:prints", code=0)
    assert any("printed" in note for note in found["notes"])
    assert "to standard output" not in json.dumps(found)


def test_the_last_lines_are_shown_when_the_loss_fails(folder):
    (folder / "talks.py").write_text("import os\ndef f(logp):\n    print('last words', flush=True)\n    os._exit(1)\n")
    assert "last words" in " ".join(graded("talks.py:f", code=3)["notes"])


def test_several_outputs_go_to_their_places(folder):
    outputs = ["text", "json:r.json", "junit:r.xml", "markdown:r.md", "github", "html:r.html"]
    options = [part for output in outputs for part in ("--output", output)]
    result = call("grade", "losses.py:k3", "--environment", "bandit", *options)
    assert result.exit_code == 1
    assert result.stdout.startswith("REFUTED")
    line = LOSSES.splitlines().index("def k3(logp, ref_logp):") + 1
    assert f"::error file=losses.py,line={line},title=KL102" in result.stdout
    assert json.loads((folder / "r.json").read_text())["verdict"] == "refuted"
    for name in ("r.xml", "r.md", "r.html"):
        assert "KL102" in (folder / name).read_text()


def test_the_first_screen_is_short_and_the_rest_is_there_when_it_is_asked_for():
    short = call("grade", "losses.py:k3", "--environment", "bandit").stdout
    assert len(short.splitlines()) <= 25
    assert "def " not in short
    whole = call("grade", "losses.py:k3", "--environment", "bandit", "--verbose").stdout
    assert whole.splitlines()[:5] == short.splitlines()[:5]
    for part in ("environment  sampler", "def squared_sum", "smallest environment in which it fails", "skipped:"):
        assert part in whole
        assert part not in short
    lines = call("grade", "losses.py:k3", "losses.py:truth", "--environment", "bandit", "-q").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["REFUTED  losses.py", "CONFIRMED  losses.py"]
    refused("grade", "k3-loss", "--quiet", "--verbose", saying="exclude each other")


def test_a_report_that_cannot_be_written_after_the_work_is_said_and_the_others_are_written(folder, monkeypatch):
    def reports(jobs, **options):
        (folder / "gone").rmdir()
        yield from canned(["confirmed"])(jobs)

    (folder / "gone").mkdir()
    monkeypatch.setattr(grade_command, "graded", reports)
    result = call("grade", "t", "--output", "json:gone/a.json", "--output", "json:kept.json")
    assert result.exit_code == 3
    assert "gone" in result.stderr
    assert json.loads((folder / "kept.json").read_text())["verdict"] == "confirmed"


def test_a_bug_of_kltest_says_so_and_keeps_the_traceback(monkeypatch):
    def broken(jobs, **options):
        raise ZeroDivisionError("planted")
        yield

    monkeypatch.setattr(grade_command, "graded", broken)
    result = call("grade", "k3-loss")
    assert result.exit_code == 3
    assert "bug in kltest" in result.stderr
    path = result.stderr.split("the traceback in ")[1].strip()
    with open(path) as file:
        assert "ZeroDivisionError: planted" in file.read()
    os.unlink(path)


def test_a_bug_of_kltest_in_the_child_says_so_and_spares_the_other_targets(monkeypatch):
    def broken(grading, loss):
        if "truth" in loss.name:
            raise ZeroDivisionError("planted")
        grading.blank, grading.finished = replace(grading.blank, verdict="confirmed"), True
        yield

    monkeypatch.setattr("kltest.grading.grader.Grading.steps", broken)
    if sys.platform != "linux":
        pytest.skip("only a forked child sees the planted bug")
    found = graded("losses.py:truth", "losses.py:k3", code=3)
    assert "bug in kltest" in found[0]["error"]
    assert found[1]["verdict"] == "confirmed"
    os.unlink(found[0]["error"].split("the traceback in ")[1])


def test_an_interrupted_run_keeps_what_is_finished(folder, monkeypatch):
    def interrupted(jobs, **options):
        yield from canned(["confirmed"])(jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr(grade_command, "graded", interrupted)
    result = call("grade", "one", "two", "--output", "json:out.json")
    assert result.exit_code == 130
    assert "1 of 2 graded, not graded: two" in result.stderr
    assert json.loads((folder / "out.json").read_text())["target"] == "one"


@pytest.mark.skipif(os.name != "posix", reason="signals")
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
    until = time.monotonic() + 60
    while not ((folder / "started").exists() and (folder / "started").read_text()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.05)
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
    for name in [*registry(), *ATLAS, *CHECKS, "bandit", "sequence", "ragged", "mdp"]:
        assert name in text
    listed = json.loads(call("list", "--json").stdout)
    assert [entry["name"] for entry in listed["estimators"]] == list(registry())
    assert [entry["name"] for entry in listed["gradients"]] == list(ATLAS)
    assert [entry["code"] for entry in listed["checks"]] == list(CHECKS)
    environments = {entry["name"]: entry for entry in listed["environments"]}
    # V^T sequences; with an end token, Σ_{t<T} 2^(t−1) that end early and 2²·3 that reach the end.
    assert environments["bandit"]["rollouts"] == 4
    assert environments["sequence"]["rollouts"] == 3**3
    assert environments["ragged"]["rollouts"] == 1 + 2 + 2**2 * 3


def test_explain_knows_every_name():
    for name in (*CHECKS, *ATLAS, *registry(), "kl102", "forward-kl-gradient", "K3_LOSS", "k3"):
        result = call("explain", name)
        assert result.exit_code == 0, name
        assert len(result.stdout.splitlines()) >= 4, name


def test_explain_of_an_unknown_name_suggests():
    refused("explain", "KL10", saying=["KL10", "did you mean"])
    refused("explain", "reverse_k", saying="reverse_kl")


def test_version_and_help():
    assert call("--version").stdout == f"kltest {__version__}\n"
    assert call("--help").exit_code == 0
    for command in ("grade", "list", "explain", "reproduce", "run", "figures", "paper"):
        assert call(command, "--help").exit_code == 0
        assert command in call("--help").stdout


HEAVY = {"torch", "numpy", "scipy", "pandas", "matplotlib"}


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], HEAVY | {f"kltest.cli.{module}" for module, _ in COMMANDS.values()}),
        (["grade", "--help"], HEAVY),
        (["explain", "KL102"], {"torch", "pandas", "matplotlib"}),
        (["list"], {"torch", "pandas", "matplotlib"}),
        (["grade", "k3-loss", "--sampler", "x"], HEAVY),
        (["grade", "losses.py:truth", "--environment", "bandit"], {"pandas", "matplotlib", "scipy.stats"}),
    ],
)
def test_nothing_heavy_is_imported_where_it_is_not_used(arguments, forbidden):
    script = f"""
        import sys
        from kltest.cli import app
        try:
            app({arguments!r})
        except SystemExit:
            pass
        print("\\nimported", *sorted(sys.modules))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    imported = set(run.stdout.split("\nimported")[1].split())
    assert "kltest.cli" in imported
    assert not imported & forbidden


def test_importing_kltest_is_cheap_and_still_gives_grade():
    script = "import sys, kltest; assert 'torch' not in sys.modules; print(kltest.grade, kltest.Report, dir(kltest))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "function grade" in run.stdout


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m kltest.cli list | head -n 1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert run.stdout == "Estimators\n"
    assert run.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", ["--help", "--version", "grade --help", "list", "explain KL102"])
def test_a_full_disk_is_said_and_is_no_bug(arguments):
    command = f"{sys.executable} -m kltest.cli {arguments} > /dev/full"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert run.returncode == 3
    assert run.stderr == "kltest: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "closed", [">&-", *(pytest.param(each, marks=pytest.mark.scheduled) for each in ("2>&- <&-", ">&- 2>&- <&-"))]
)
def test_closed_streams_are_as_good_as_none(folder, closed):
    """Left closed, the pipes to the process that grades would take the place of standard output."""
    targets = "k1-reward k3-loss --environment bandit --select KL1"
    command = f"{sys.executable} -m kltest.cli grade {targets} --output json:r.json --output text {closed}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=folder)
    assert run.returncode == 1
    assert [report["verdict"] for report in json.loads((folder / "r.json").read_text())] == ["confirmed", "refuted"]
    assert ("2 targets" in run.stdout) == (">&-" not in closed.replace("2>&-", ""))
    assert run.stderr == ""


def test_a_terminal_that_knows_no_unicode_still_gets_json():
    command = [sys.executable, "-m", "kltest.cli", "list", "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    run = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert json.loads(run.stdout.decode("utf-8"))["gradients"]


WORDS = """
    grade list explain reproduce run figures paper k3-loss KL102 reverse_kl losses.py:k3 a.b:c
    --expect --placement --credit --environment --sampler --arg --select --ignore --seed --timeout --group-size
    --batch-size --output --json --scale --only --help --version -h -- -
    reward to-go bandit,mdp stale x=@logp x=1 KL1 0 -1 5 nan inf 1e400 text json:- junit:x.xml github:/ html:
    2*forward_kl-entropy quick
"""
TOKENS = st.one_of(st.sampled_from(WORDS.split()), st.text(max_size=8))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TOKENS, max_size=8))
def test_no_list_of_arguments_gives_a_traceback_or_an_unknown_exit_code(arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grade_command, "graded", lambda jobs, **_: canned(["confirmed"] * len(jobs))(jobs))
        for name in ("reproduce", "run", "figures", "paper"):
            patch.setattr(f"kltest.reproduce.commands.{name}", lambda *_, **__: 0)
        result = call(*arguments)
    assert result.exit_code in (0, 2, 5), (arguments, result.output)
