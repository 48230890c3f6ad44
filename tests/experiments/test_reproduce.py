"""The main job on a small checkout of its own: discovery, resumption, exit codes, what is written."""

import errno
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from called import WRITTEN
from processes import until, written
from trial import look_up
from weekly import first

from kltest.cli.reproduce import EXPERIMENTS
from kltest.errors import KltestError, UsageError
from kltest.files import as_csv, as_markdown, held, write
from kltest.reproduce import Request, figures, paper, reproduce, run
from kltest.reproduce.bounds import EVERY, above, at_least, at_most, below, exactly, near, within
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.claims import Claim, Claims
from kltest.reproduce.commands import summary
from kltest.reproduce.frames import Missing, frame, mean, need, records, results, select
from kltest.reproduce.numbers import Numbers, extremes, melted, number
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import Store, digest

PYPROJECT = '[project]\nname = "kltest"\n'

SETTINGS = (WRITTEN / "roots_settings.py").read_text(encoding="utf-8")

EXPERIMENT = (WRITTEN / "roots_experiment.py").read_text(encoding="utf-8")

ANALYSIS = (WRITTEN / "roots_claims.py").read_text(encoding="utf-8")

FIGURE = (WRITTEN / "roots_figure.py").read_text(encoding="utf-8")

RESULTS = (Path(__file__).parents[2] / "paper" / "results.typ").read_text()
STYLE = (Path(__file__).parents[2] / "figures" / "style.py").read_text()
PAPER = '#import "results.typ": *\nThe largest root is #n("roots", "root", which: "largest", digits: 2).'


def experiment(name: str, settings: str = SETTINGS, code: str = EXPERIMENT) -> dict[str, str]:
    files = {"experiment": settings + code, "claims": ANALYSIS}
    return {f"experiments/{name}/{file}.py": text for file, text in files.items()}


def populate(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one experiment, one figure and a paper, and the current directory inside it."""
    root = populate(
        tmp_path / "checkout",
        {
            "pyproject.toml": PYPROJECT,
            **experiment("roots"),
            "figures/style.py": STYLE,
            "figures/roots.py": FIGURE,
            "paper/paper.typ": PAPER,
            "paper/results.typ": RESULTS,
        },
    )
    monkeypatch.chdir(root)
    for name in ("PAUSE", "BREAK", "CALLS", "LIMIT"):
        monkeypatch.delenv(name, raising=False)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Every result below a folder, but for the order in which the store was filled."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {
        name: b"".join(sorted(data.splitlines())) if name.endswith(".jsonl") else data for name, data in files.items()
    }


# Discovery


def test_a_checkout_is_found_from_any_directory_inside_it(checkout):
    assert Checkout.find(checkout / "experiments" / "roots").root == checkout.resolve()


def test_elsewhere_the_error_says_where_it_looked_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"not inside a checkout of kltest.*clone") as error:
        reproduce()
    assert str(tmp_path) in str(error.value)


def test_another_projects_experiments_are_not_ours(tmp_path):
    populate(tmp_path, {"pyproject.toml": '[project]\nname = "other"\n', "experiments/x/experiment.py": ""})
    with pytest.raises(UsageError):
        Checkout.find(tmp_path)


def test_a_new_folder_is_an_experiment_without_being_listed_anywhere(checkout):
    populate(checkout, {**experiment("cubes"), "experiments/notes/README.md": "no settings, no experiment"})
    assert Checkout.find().experiments() == ["cubes", "roots"]
    assert run("cubes") == 0


def test_an_unknown_experiment_names_those_that_exist(checkout):
    with pytest.raises(UsageError, match=r"'rots'.*roots"):
        run("rots")
    with pytest.raises(UsageError, match="roots"):
        reproduce(only=["rots"])


def test_two_checkouts_do_not_share_modules(checkout, tmp_path):
    other = populate(
        tmp_path / "other",
        {"pyproject.toml": PYPROJECT, "experiments/roots/experiment.py": SETTINGS.replace("12", "3")},
    )
    first, second = (Checkout.find(root).load("experiments", "roots", "experiment") for root in (checkout, other))
    assert [len(module.SETTINGS.values["number"]) for module in (first, second)] == [12, 3]


# The whole job


def test_everything_is_made_and_the_summary_ends_it(checkout, capsys):
    assert reproduce() == 0
    made = contents(checkout / "results")
    assert {
        *("roots/roots.csv", "roots/roots.json", "roots/table.md", "roots/numbers.json", "roots/claims.json"),
        *("figures/roots.pdf", "figures/roots.svg", "figures/roots.png", "paper/paper.pdf", "summary.csv"),
        *("summary.json", "summary.md"),
    } <= made.keys()
    assert made["paper/paper.pdf"].startswith(b"%PDF")
    out = capsys.readouterr().out
    assert "1 of 1 claims agree, 0 disagree, 0 not run" in out
    assert "roots are small" not in out
    assert "Every claim is in results/summary.md, the paper is results/paper/paper.pdf." in out
    assert "roots are small" in made["summary.md"].decode()


def test_full_scale_goes_on_from_quick(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    assert run("roots") == 0
    assert run("roots", request=Request(scale="full")) == 0
    assert sorted(map(int, (tmp_path / "calls").read_text().split())) == list(range(24))


def test_what_is_recorded_is_made_at_full_scale_by_its_own_command_alone(checkout):
    populate(checkout, experiment("roots", SETTINGS.replace("tags=()", "tags=(), recorded=True")))

    def made() -> int:
        return len(json.loads((checkout / "out" / "roots" / "roots.json").read_text()))

    assert reproduce(output="out", request=Request(scale="full")) == 0
    assert made() == 12
    assert run("roots", output="out", request=Request(scale="full")) == 0
    assert made() == 24


def test_a_disagreeing_claim_is_exit_1_and_is_told_in_full(checkout, monkeypatch, capsys):
    monkeypatch.setenv("LIMIT", "2")
    monkeypatch.setenv("COLUMNS", "120")  # in a narrow table a sentence goes on below
    assert reproduce() == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "NO roots: roots are small" in out
    assert f"{11**0.5 / 2:.3g}" in out, "what was found"
    assert "source: arithmetic" in out


def test_a_failing_configuration_is_exit_3_and_the_others_are_kept(checkout, monkeypatch, capsys):
    monkeypatch.setenv("BREAK", "5")
    assert run("roots") == 3
    assert "roots: 5 failed: ValueError: this number is unlucky" in capsys.readouterr().err
    rows = json.loads((checkout / "results/roots/roots.json").read_text())
    assert [row["number"] for row in rows] == [number for number in range(12) if number != 5]
    monkeypatch.setenv("BREAK", "-1")
    assert run("roots", request=Request(retry_failed=True)) == 0


@pytest.mark.parametrize(
    ("files", "said", "counted"),
    [
        (experiment("broken", "", "1 / 0\n"), "broken failed", "1 of 2 claims agree, 0 disagree, 1 not run"),
        (
            {"figures/zero.py": "READS = ('roots',)\n\ndef draw(rows):\n    1 / 0\n"},
            "figure zero failed",
            "1 of 1 claims agree, 0 disagree, 0 not run",
        ),
    ],
    ids=["experiment", "figure"],
)
def test_what_fails_is_exit_3_and_the_rest_is_made(checkout, capsys, files, said, counted):
    populate(checkout, files)
    assert reproduce() == 3
    printed = capsys.readouterr()
    assert f"{said}: ZeroDivisionError" in printed.err
    assert counted in printed.out
    assert (checkout / "results/paper/paper.pdf").exists()


def test_what_only_leaves_out_is_said_not_to_have_been_run(checkout, capsys):
    populate(checkout, {"experiments/other/experiment.py": "1 / 0\n"})
    assert reproduce(only=["roots"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 claims agree, 0 disagree, 1 not run (1 of these not asked for)." in printed
    assert printed.count("not asked for") == 2


def test_the_help_names_the_experiments_of_the_checkout():
    folders = {path.parent.name for path in Path(__file__).parents[2].glob("experiments/*/experiment.py")}
    assert set(EXPERIMENTS) == folders


def test_settings_of_ones_own_go_beside_the_results_that_figures_read(checkout, capsys):
    assert run("roots") == 0
    before = contents(checkout / "results")
    capsys.readouterr()
    assert run("roots", request=Request(changes=("number=3, 40",))) == 0
    folder, *_, last = capsys.readouterr().out.splitlines()
    assert folder.startswith("Results are in ")
    assert "roots@number=3,40: " in folder
    assert "roots.json" in folder
    assert "of 1 claims agree" in last
    after = contents(checkout / "results")
    assert {name: after[name] for name in before} == before
    own = checkout / "results" / "roots@number=3,40"
    assert [row["number"] for row in json.loads((own / "roots.json").read_text())] == [3, 40]
    assert json.loads((own / "settings.json").read_text()) == {"scale": "quick", "number": [3, 40]}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: run("roots", request=Request(changes=("numbers=3",))), "did you mean number"),
        (lambda: run("roots", request=Request(changes=("number=100",))), "between 0 and 99"),
        (lambda: run("roots", request=Request(workers=0)), "--workers"),
        (lambda: reproduce(request=Request(scale="huge")), "'huge'.*quick, full"),
        (lambda: reproduce(output="pyproject.toml/below"), "cannot write to the output folder"),
    ],
)
def test_what_cannot_be_is_told_before_the_work(checkout, monkeypatch, tmp_path, asked, said):
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    with pytest.raises(UsageError, match=said):
        asked()
    assert not (tmp_path / "calls").exists()
    assert not (checkout / "results" / "roots").exists()


def test_figures_and_paper_without_their_experiment_are_left_out_with_it(checkout, capsys):
    """With --only; what was run before is drawn all the same."""
    both = FIGURE.replace("def draw", "READS = ('roots', 'cubes')\n\ndef draw")
    populate(checkout, {**experiment("cubes"), "figures/both.py": both})
    assert reproduce(only=["roots"]) == 0
    out = capsys.readouterr().out
    assert "both is not drawn, for want of cubes" in out
    assert "paper: not built, for want of cubes" in out
    assert (checkout / "results/figures/roots.png").exists()
    assert run("cubes") == 0
    assert reproduce(only=["roots"]) == 0
    assert (checkout / "results/figures/both.png").exists()
    assert (checkout / "results/paper/paper.pdf").exists()


def test_a_score_is_the_share_of_claims_that_agree(checkout, monkeypatch):
    for limit, score in (("100", 1.0), ("2", 0.0)):
        monkeypatch.setenv("LIMIT", limit)
        run("roots")
        numbers = frame(json.loads((checkout / "results/roots/numbers.json").read_text()))
        assert look_up(numbers, "score") == score
        assert look_up(numbers, "root", which="largest") == 11**0.5


# Stopping and going on


@pytest.mark.parametrize(
    "changed",
    first(2, [None, "out/roots/roots.csv", "figures/roots.py", "experiments/roots/claims.py", "paper/paper.typ"]),
)
def test_if_nothing_has_changed_nothing_is_made_again(checkout, monkeypatch, capsys, tmp_path, changed):
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    assert reproduce(output="out") == 0
    first, said = contents(checkout / "out"), capsys.readouterr().out
    if changed is None:
        monkeypatch.setattr("kltest.reproduce.commands._experiments", None)  # is not called
    else:
        end = "  // the same\n" if changed.endswith(".typ") else "\n# the same\n"
        (checkout / changed).write_text((checkout / changed).read_text() + end)
    assert reproduce(output="out") == 0
    again = capsys.readouterr().out
    assert ("nothing was made again" in again) is (changed is None)
    counted = "1 of 1 claims agree, 0 disagree, 0 not run."
    assert counted in said
    assert counted in again
    assert contents(checkout / "out") == first
    assert len((tmp_path / "calls").read_text().split()) == 12, "rows that are there are not computed again"


@pytest.mark.scheduled
def test_a_change_of_what_is_asked_for_or_of_a_library_is_a_change(checkout, monkeypatch, capsys):
    assert reproduce(output="out") == 0
    assert reproduce(output="out", request=Request(scale="full")) == 0
    assert reproduce(output="out") == 0
    monkeypatch.setattr("kltest.reproduce.unchanged.installation", lambda: "another numpy")
    assert reproduce(output="out") == 0
    assert "nothing was made again" not in capsys.readouterr().out
    (checkout / "out" / ".complete.json").write_text("{")
    assert reproduce(output="out") == 0
    assert "nothing was made again" not in capsys.readouterr().out


def test_results_of_other_code_are_not_reused(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    run("roots")
    with (checkout / "experiments/roots/experiment.py").open("a") as file:
        file.write("# another version\n")
    run("roots")
    assert len((tmp_path / "calls").read_text().split()) == 24


DRIVER = """
import sys
from kltest.reproduce import Request, run
sys.exit(run("roots", output=sys.argv[1], request=Request(workers=int(sys.argv[2]))))
"""


def start(checkout: Path, output: Path, workers: int = 1, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(output), str(workers)],
        cwd=checkout,
        env={**os.environ, "PAUSE": "0.03", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_and_started_again_the_results_are_those_of_an_undisturbed_run(checkout, tmp_path):
    undisturbed, disturbed, calls = tmp_path / "undisturbed", tmp_path / "disturbed", tmp_path / "calls"
    assert start(checkout, undisturbed).wait() == 0
    process = start(checkout, disturbed, CALLS=str(calls))
    until(written, disturbed / "roots" / "runs.jsonl", 4)
    time.sleep(random.Random(4).uniform(0, 0.05))
    process.kill()
    process.wait()
    assert start(checkout, disturbed, CALLS=str(calls)).wait() == 0
    assert contents(disturbed) == contents(undisturbed)
    # A kill can cost what a worker is computing and what it has just handed over, never more.
    assert len(calls.read_text().split()) <= 12 + 2


@pytest.mark.scheduled
def test_killed_twenty_times_at_random_moments_nothing_is_lost_and_nothing_done_twice(checkout, tmp_path):
    undisturbed, disturbed, calls = tmp_path / "undisturbed", tmp_path / "disturbed", tmp_path / "calls"
    assert start(checkout, undisturbed).wait() == 0
    generator, kept = random.Random(0), 0
    for kill in range(20):
        process = start(checkout, disturbed, 1 + kill % 2, CALLS=str(calls), PAUSE="0.1")
        time.sleep(generator.uniform(0.2, 1.5))
        process.kill()
        process.wait()
        store = disturbed / "roots" / "runs.jsonl"
        finished = store.read_bytes().count(b"\n") if store.exists() else 0
        assert finished >= kept
        kept = finished
    assert start(checkout, disturbed, 2, CALLS=str(calls)).wait() == 0
    assert contents(disturbed) == contents(undisturbed)
    # What a kill can cost: a configuration under way and one just handed over, in each of two processes.
    assert len(calls.read_text().split()) <= 12 + 20 * 4


@pytest.mark.scheduled
def test_workers_do_not_outlive_a_killed_parent(checkout, tmp_path):
    calls = tmp_path / "calls"
    process = start(checkout, tmp_path / "out", 2, CALLS=str(calls), PAUSE="0.2")
    until(written, calls, 2)
    process.kill()
    process.wait()
    time.sleep(0.5)
    before = calls.read_text()
    time.sleep(1.0)
    assert calls.read_text() == before


@pytest.mark.parametrize("workers", first(1, [1, 2]))
def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(checkout, tmp_path, workers):
    process = start(checkout, tmp_path / "out", workers, PAUSE="0.1")
    until(written, tmp_path / "out/roots/runs.jsonl", 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "`kltest run roots`" in err
    assert "Traceback" not in err
    assert 3 <= (tmp_path / "out/roots/runs.jsonl").read_bytes().count(b"\n") < 12


@pytest.mark.scheduled
def test_a_killed_worker_is_a_failed_experiment_and_the_rest_is_kept(checkout, tmp_path):
    process = start(checkout, tmp_path / "out", 2, DIE="8")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "a worker process was killed" in err
    assert (tmp_path / "out/roots/runs.jsonl").read_bytes().count(b"\n") >= 4
    assert start(checkout, tmp_path / "out", 2).wait() == 0


def test_a_second_run_on_the_same_results_is_refused(checkout, tmp_path):
    with Store(tmp_path / "runs.jsonl", "1"), pytest.raises(UsageError, match="another kltest is writing"):  # noqa: SIM117
        with Store(tmp_path / "runs.jsonl", "1"):
            pass


def test_a_second_job_in_the_same_folder_is_refused_at_once_and_a_dead_one_holds_nothing(
    checkout, monkeypatch, tmp_path
):
    output, calls = tmp_path / "out", tmp_path / "calls"
    output.mkdir()
    monkeypatch.setenv("CALLS", str(calls))
    with held(output):
        for command in (lambda: reproduce(output=output), lambda: run("roots", output=output)):
            with pytest.raises(UsageError, match=r"another kltest is writing to .*--output"):
                command()
    assert not calls.exists()
    process = start(checkout, output, PAUSE="0.2")
    until(written, output / "roots" / "runs.jsonl", 1)
    with pytest.raises(UsageError, match="another kltest is writing"):
        reproduce(output=output)
    with held(output, shared=True):
        pass
    process.kill()
    process.wait()
    assert reproduce(output=output) == 0


@pytest.mark.parametrize(
    ("spoilt", "kept", "foreign"),
    first(
        1,
        [
            (lambda whole: whole[:-7], 1, []),
            (lambda whole: b"hello\n[]\n" + whole, 2, [1, 2]),
            (lambda whole: whole.replace(b"0.2", b"0.3"), 1, [2]),
        ],
    ),
    ids=["torn", "foreign", "changed"],
)
def test_a_spoilt_line_is_passed_over_and_named_and_the_rest_is_kept(tmp_path, spoilt, kept, foreign):
    path = tmp_path / "runs.jsonl"
    done = [({"a": 1}, [{"x": 0.1}]), ({"a": 2}, [{"x": 0.2}])]
    with Store(path, "1") as store:
        store.add(done)
    path.write_bytes(spoilt(path.read_bytes()))
    with Store(path, "1") as store:
        assert [store.result(one) for one, _ in done] == [[{"x": 0.1}], [{"x": 0.2}] if kept == 2 else None]
        assert store.foreign_lines == foreign
        store.add(done[kept:])
    with Store(path, "1") as store:
        assert [store.result(one) for one, _ in done] == [rows for _, rows in done]


def full_disk(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path, monkeypatch):
    with Store(tmp_path / "runs.jsonl", "1") as store:
        store.add([({"a": 1}, [])])
        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(KltestError, match=r"No space left.*is kept"):
            store.add([({"a": 2}, [])])
    monkeypatch.undo()
    with Store(tmp_path / "runs.jsonl", "1") as store:
        assert store.result({"a": 1}) == []


def test_a_configuration_is_named_by_its_content_not_its_order():
    assert digest({"a": 1, "b": 2.5}) == digest({"b": 2.5, "a": 1}) != digest({"a": 1, "b": 2})


# Files, figures, paper


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(KltestError, match="No space left"):
        write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tables_keep_all_digits_and_escape_what_would_break_them():
    assert as_csv([{"a": 0.1 + 0.2, "b": None}, {"a": 1.0, "b": {"x": 1.0}}]) == (
        'a,b\n0.30000000000000004,\n1.0,"{""x"": 1.0}"\n'
    )
    assert as_markdown([{"a": "π|ref"}]) == "| a |\n| --- |\n| π\\|ref |\n"


@pytest.mark.scheduled
def test_figures_and_paper_are_the_same_bytes_when_made_again_in_another_process(checkout):
    assert run("roots") == 0
    code = "import sys; from kltest.reproduce import figures, paper; sys.exit(figures() or paper())"
    made = []
    for seed in ("1", "2"):
        seeded = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code], check=True, env=seeded, cwd=checkout)
        made.append({name: contents(checkout / "results" / name) for name in ("figures", "paper")})
        time.sleep(1.1 if seed == "1" else 0)  # a date in a file would have the resolution of a second
    assert made[0] == made[1]
    assert len(made[0]["figures"]) == 3
    assert "paper.pdf" in made[0]["paper"]


def test_a_figure_without_results_says_which_file_is_missing(checkout, capsys):
    assert figures() == 3
    err = capsys.readouterr().err
    assert "there is no" in err
    assert "roots.json" in err
    assert "Traceback" not in err


def test_the_paper_refuses_a_number_that_results_do_not_contain(checkout):
    run("roots")
    populate(
        checkout, {"paper/paper.typ": PAPER + '#n("roots", "smallest") #n("roots", "root", which: "mean", digits: 2)'}
    )
    with pytest.raises(UsageError, match="roots: root, which mean; roots: smallest"):
        paper()
    populate(checkout, {"paper/paper.typ": PAPER + '#n("cubes", "largest")'})
    with pytest.raises(UsageError, match=r"no results of cubes.*kltest reproduce"):
        paper()


def test_a_terminal_without_unicode_gets_question_marks(checkout, monkeypatch):
    analysis = checkout / "experiments/roots/claims.py"
    analysis.write_text(analysis.read_text().replace("roots are small", "∇ is small"))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run("roots") == 0
    stdout.seek(0)
    assert "? is small" in stdout.read()


def test_a_mistake_in_the_paper_is_told_with_its_place(checkout):
    run("roots")
    populate(checkout, {"paper/paper.typ": "#unknown-thing"})
    with pytest.raises(KltestError, match="unknown variable"):
        paper()


# Progress and summary


def test_without_a_terminal_progress_is_a_line_each_ten_percent(capsys):
    with Progress("work", 1000) as progress:
        for _ in range(1000):
            progress.advance("x")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "work: 100 % (1000 of 1000) x"
    assert "left" in lines[5]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_summary_fits_its_width_the_worst_first_and_folds_what_agrees(width):
    words = [f"word{at}" for at in range(60)]
    claims = [
        Claim("atlas", "agreeing", "s", "x", "x", True),
        Claim("other", "all", "", "", "left out", None),
        Claim("atlas", " ".join(words), "the source", "∇KL(π‖ref)", "0", False, "1e-9"),
    ]
    for text in (summary(claims, width), summary(claims, width, fold=True)):
        assert [word for word in re.findall(r"word\d+", text)] == words
        assert "…" not in text
        lines = text.splitlines()
        assert all(len(line) <= width for line in lines)
        assert lines[-1] == "1 of 3 claims agree, 1 disagree, 1 not run."
        assert text.index("word0") < text.index("left out")
        assert "source: the source" in " ".join(text.split())
        assert text.index("tolerance:") < text.index("1e-9")
    assert "agreeing" in summary(claims, width)
    assert "left out" not in summary(claims, width, decided=True)
    assert summary(claims[1:2], width, decided=True) == "0 of 1 claims agree, 0 disagree, 1 not run."
    folded = summary(claims, width, fold=True)
    assert "agreeing" not in folded
    assert ["atlas", "1", "2", "0.50"] in [line.split() for line in folded.splitlines()]
    assert ["other", "0", "1", "–"] in [line.split() for line in folded.splitlines()]


# Results as frames


def test_results_of_an_experiment_are_a_frame(checkout):
    assert run("roots") == 0
    found = results("roots")
    assert found["number"].tolist() == list(range(12))
    assert found.dtypes.astype(str).to_dict() == {"number": "int64", "root": "float64"}
    assert results("roots", checkout / "results", number=(4, 9))["root"].tolist() == [2.0, 3.0]
    assert results("roots", number=99).empty
    with pytest.raises(UsageError, match=r"no results of 'rots'.*there are: roots"):
        results("rots")


ROWS = [
    {"part": "a", "n": 1, "x": 0.5, "none": None},
    {"part": "a", "n": 2, "x": 1.5, "none": 2.0},
    {"part": "b", "words": "w", "many": [1, 2], "n": 3},
]


def test_rows_come_back_as_they_were_and_parts_have_their_own_types():
    assert records(frame(ROWS)) == ROWS
    part = select(ROWS, "a")
    assert part["n"].dtype == "int64"
    assert part["none"].isna().tolist() == [True, False]
    assert part["none"].dtype == part["x"].dtype == "float64"
    assert select(ROWS, "a", n=2)["x"].tolist() == [1.5]
    assert select(ROWS, n=(1, 3))["n"].tolist() == [1, 3]
    assert select(ROWS, "a", x=lambda x: x > 1)["n"].tolist() == [2]
    assert select([], "a", x=lambda x: x > 1).empty
    assert select([], "a").empty
    assert select(ROWS, nothing=1).empty
    with pytest.raises(Missing):
        need(ROWS, "c")
    with pytest.raises(Missing):
        mean(select(ROWS, "c").get("x", []))


def test_a_measured_claim_writes_the_bounds_that_it_tests():
    claims = Claims("e")

    @claims.measure("source", "why", most=below(1), n=at_most(1))
    def judge(rows, n):
        """up to {n} it is below {most}"""
        return {"most": need(rows, "a", n=n)["x"], "rows_seen": 1}

    for sentence, part in (("and above", "a"), ("not there", "c")):
        claims.measure("source", "why", claim=sentence, x=above(0.5), part=part)(
            lambda rows, part: {"x": need(rows, part)["x"]}
        )
    assert [(one.claim, one.expected, one.found, one.agrees, one.tolerance) for one in claims(ROWS)] == [
        ("up to 1 it is below 1", "most < 1 (where n ≤ 1)", "most: 0.5; rows seen: 1", True, "why"),
        ("and above", "x > 0.5 (where part a)", "x: 0.5 to 1.5, of 2", False, "why"),
        ("not there", "x > 0.5 (where part c)", "not run", None, "why"),
    ]


@pytest.mark.parametrize(
    "sentence", ["it is below 2", "it is 5% of it", "up to half", "`1.35` at most", "at .9", "a hundred"]
)
def test_a_claim_whose_sentence_has_a_number_of_its_own_is_refused(sentence):
    with pytest.raises(ValueError, match="no bound of the claim"):
        Claims("e").measure("source", "why", claim=sentence, x=below(2))(lambda rows: {"x": 1})


def test_names_and_formulas_may_have_digits_and_a_claim_needs_a_bound():
    sentence = "k3 in float32, D₂ and `(1 − 1/n)·∇KL`: below {x:.0%}"
    Claims("e").measure("source", "why", claim=sentence, x=below(2))(lambda rows: {"x": 1})
    with pytest.raises(ValueError, match="at least one"):
        Claims("e").measure("source", "why")(lambda rows: {"x": 1})


@pytest.mark.parametrize(
    ("bound", "inside", "outside", "words"),
    [
        (within(1, 1.35), (1.01, 1.34), (0.9, 1, 1.35, math.nan), "1 < x < 1.35"),
        (below(1e-9), (-1, 0), (1e-9, math.nan), "x < 1e−9"),
        (at_least(2), (2, 3), (1.9, math.nan), "x ≥ 2"),
        (near(0, 1e-3), (-9e-4, 0), (1e-3, -1e-3, math.nan), "|x| < 0.001"),
        (near(1, 0.02), (0.981, 1.019), (0.97, 1.021, math.nan), "|x − 1| < 0.02"),
        (exactly(3), (3,), (2, 4, math.nan), "x = 3"),
        (EVERY, (True,), (False,), "x: in every case"),
    ],
)
def test_a_bound_tests_what_it_writes(bound, inside, outside, words):
    assert [bool(bound(one)) for one in (*inside, *outside)] == [True] * len(inside) + [False] * len(outside)
    assert bound.of("x") == words


def test_single_numbers_of_columns_by_name_or_by_a_function():
    numbers = Numbers()
    numbers.single("a", {"most": ("x", "max"), "above one": ("x", lambda x: (x > 1).sum())})
    numbers.single("c", {"least": ("x", "min")})
    assert records(numbers(ROWS)) == [{"quantity": "most", "value": 1.5}, {"quantity": "above one", "value": 1}]


def test_numbers_of_a_part_as_they_are_or_as_means():
    numbers, rows = Numbers(), [{"part": "a", "n": n, "x": x} for n, x in ((1, 1.0), (1, 2.0), (2, 5.0))]
    numbers.melt("a", {"x": "as it is"}, ["n"], n=2)
    numbers.melt("a", ["x"], ["n"], means=True)
    numbers.melt("c", ["x"], ["n"])
    found = numbers(rows)
    assert [look_up(found, "as it is", n=2), look_up(found, "x", n=1), look_up(found, "x", n=2)] == [5.0, 1.5, 5.0]
    assert len(found) == 3


def test_numbers_are_looked_up_by_all_of_their_columns():
    numbers = Numbers()

    @numbers.add
    def of_a(rows):
        yield number("first", 1, of="a")
        yield from melted(need(rows, "a"), ["x"], ["n"])
        yield from extremes("x", need(rows, "a")["x"])
        yield from extremes("x", [], of="nothing")

    @numbers.add
    def of_c(rows):
        yield number("kept", 1)
        yield number("missing", need(rows, "c"))

    found = numbers(ROWS)
    assert look_up(found, "x", n=2) == look_up(found, "largest x") == 1.5
    assert look_up(found, "kept") == 1
    for quantity, where in (("x", {}), ("x", {"n": 3}), ("missing", {}), ("largest x", {"of": "nothing"})):
        with pytest.raises(KeyError):
            look_up(found, quantity, **where)


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, living, other = (tmp_path / f".a.csv.{name}" for name in (ended.pid, os.getppid(), "kept"))
    for path in (dead, living, other):
        path.write_text("half")
    write(tmp_path / "a.csv", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", living.name, other.name}
