"""`kltest libraries` on a library made here: installed from a wheel, graded, changed, broken; what is said of it."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from called import WRITTEN
from packaging.requirements import Requirement
from processes import ran, until

from kltest.adapters import NAMES, before, find, named
from kltest.cli.libraries import Measurement, libraries, listing, printed
from kltest.errors import KltestError, UsageError
from kltest.scoreboard import history as releases_of
from kltest.scoreboard import measurement, recorded
from kltest.scoreboard.installation import NEEDED, exact_version, install
from kltest.scoreboard.releases import InstallError, UnreachableError
from kltest.scoreboard.rows import absent, changes
from kltest.scoreboard.table import frame

ROOT = Path(__file__).resolve().parents[2]
LOSSES = (WRITTEN / "made_up_losses.py").read_text(encoding="utf-8")
ADAPTER = (WRITTEN / "made_up_adapter.py").read_text(encoding="utf-8")


def wheel(folder: Path, version: str, losses: str, name: str = "kltest_made_up", tag: str = "py3-none-any") -> None:
    """A wheel is a zip file with a few words about itself."""
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/losses.py", losses)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """The adapter's file; 2.0 doubles the square of 1.0 and has a setting more, 3.0 and 5.0 cannot be imported."""
    folder = tmp_path_factory.mktemp("made_up")
    wheel(folder, "1.0", "FACTOR = 1\n" + LOSSES)
    more = LOSSES.replace('if kind == "linear"', 'if kind in ("linear", "straight")')
    wheel(folder, "2.0", "FACTOR = 2\n" + more)
    wheel(folder, "3.0", "import os\nprint('about to leave')\nos._exit(9)\n")
    wheel(folder, "5.0", "import kltest_needed\nFACTOR = 1\n" + LOSSES)
    wheel(folder, "1.0", "", "kltest_needed")
    file = folder / "adapter.py"
    file.write_text(ADAPTER.replace("WHEELS", str(folder)))
    return file


@pytest.fixture(scope="module", autouse=True)
def _environments(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLTEST_LIBRARIES", str(tmp_path_factory.mktemp("environments")))
        yield


@pytest.fixture(scope="module")
def measured(made_up, tmp_path_factory):
    """All settings of 1.0, once: exit code, folder, rows by setting."""
    folder = tmp_path_factory.mktemp("results")
    code = libraries([str(made_up)], output=str(folder))
    return code, folder, rows_of(folder)


KINDS = ("linear", "square", "raises", "leaves", "kills", "fills", "hangs", "straight")


def rows_of(folder):
    """By version and setting, in the order of the adapter; they are finished in any order."""
    records = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    rows = {(row["version"], row["setting"]): row for record in records for row in record["rows"]}
    return dict(sorted(rows.items(), key=lambda item: KINDS.index(item[0][1].removeprefix("penalty/"))))


def running(file):
    """Command lines of processes, of Linux, that have a file in them; one may end while it is read."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(process.read_text(errors="replace"))
    return [line for line in found if str(file) in line]


def test_each_setting_is_graded_or_says_why_not(measured, made_up):
    """u: zero; u²/2: the local reverse KL, by the score's own identities; what fails fails alone.

    Neither takes the sampler's log-probs, and both are graded under a stale one: E_μ[g] is −∇KL(μ‖π), and without a
    ratio rollouts of μ weight u·g.
    """
    code, _, rows = measured
    assert code == 3, "five settings were not graded, and nothing is recorded of that"
    assert list(rows) == [("1.0", f"penalty/{kind}") for kind in KINDS[:-1]]
    linear, square, raises, leaves, kills, fills, hangs = rows.values()
    environments = ("bandit", "sequence", "ragged")
    assert {(row["environment"], row["sampler"]): row["identified"] for row in linear["gradients"]} == {
        **{(environment, "current"): {"zero": 1.0} for environment in environments},
        **{(environment, "stale"): {"from_sampler_kl": -1.0} for environment in environments},
    }
    assert {(row["sampler"], row["agrees"]) for row in square["gradients"]} == {("current", True), ("stale", False)}
    assert square["expect"] == "local_reverse_kl"
    assert not square["reads_sampler"]
    assert frame([square])["off_policy"][0].startswith("no ratio: bandit: E_μ")
    assert "this version does not know how" in raises["error"]
    assert "exit status 7" in leaves["error"]
    assert "the process that graded it was killed" in kills["error"]
    # What a killed process forked ends with it, once the kernel has taken it down.
    until(lambda: not running(made_up))
    assert "File too large" in fills["error"]
    left = re.findall(r"(/\S+/setting-\S+)", " ".join(fills["notes"]))
    assert len(left) > 1
    assert not any(map(os.path.exists, left)), "what it wrote is deleted"
    assert "4 s" in hangs["error"]
    assert linear["program"]
    assert "kltest" not in linear["program"].replace("kltest_made_up", "")
    assert linear["versions"]["kltest"]
    assert linear["default"]
    assert not square["default"]


@pytest.mark.scheduled
def test_a_new_version_is_told_apart(measured, made_up, tmp_path, monkeypatch, capsys):
    """2.0 doubles one gradient and has a setting more."""
    *_, rows = measured
    monkeypatch.setattr(recorded, "PATH", tmp_path / "recorded.jsonl")
    recorded.record(list(rows.values()))
    asked = Measurement(settings=("penalty/linear", "penalty/square", "penalty/straight"))
    names = [f"{made_up}==2.0"]
    assert libraries(names, output=str(tmp_path), request=asked, diff=True, record=True) == 1
    said = capsys.readouterr().out.partition("What changed.")[2]
    assert re.search(r"penalty/square: gradients.* 1\.0: .*local_reverse_kl;.* → .*2\*local_reverse_kl;", said)
    assert "penalty/straight: new, bandit, current: zero" in said
    assert "penalty/linear" not in said
    assert (tmp_path / "changes.md").read_text().count("\n- ") == 2
    versions = [(row["version"], row["setting"]) for row in recorded.read()]
    assert len(versions) == 3 + len(rows)
    assert versions[:3] == [("2.0", f"penalty/{kind}") for kind in ("linear", "square", "straight")]
    assert {version for version, _ in versions} == {"1.0", "2.0"}


@pytest.mark.scheduled
def test_a_library_that_breaks_down_stops_no_other_and_is_mended_by_a_package(made_up, tmp_path, monkeypatch, capsys):
    """With its environment's path, what is missing, and how to add it; and its environment has the command."""
    asked = Measurement(settings=("penalty/square",))
    assert (
        libraries([f"{made_up}=={version}" for version in ("3.0", "4.0", "5.0")], output=str(tmp_path), request=asked)
        == 3
    )
    out, said = (tmp_path / "libraries.md").read_text(), capsys.readouterr().err
    assert "exit code 9: about to leave" in out
    assert "kltest-made-up==4.0" in out  # what pip was asked for
    assert said.count("cannot be imported") == 1
    (home,) = re.findall(r"kltest-made-up cannot be imported in (\S+): ModuleNotFoundError", said)
    assert "No module named 'kltest_needed'" in said
    assert "--with kltest_needed adds a package" in said
    assert not (tmp_path / "runs.jsonl").read_text()
    done = ran(f"{home}/bin/kltest", "--version")
    assert done.stdout.startswith("kltest "), done.stdout + done.stderr
    monkeypatch.setenv("PIP_FIND_LINKS", str(made_up.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    asked = Measurement(settings=("penalty/square",), more=("kltest_needed",))
    assert libraries([f"{made_up}==5.0"], output=str(tmp_path), request=asked) == 0
    assert rows_of(tmp_path)["5.0", "penalty/square"]["gradients"][0]["agrees"]


def test_releases_that_are_named_are_compared_with_one_another(measured, made_up, tmp_path, capsys, monkeypatch):
    """Whatever is recorded; nothing is measured: 2.0 is 1.0 with a square without gradient."""
    shutil.copy(measured[1] / "runs.jsonl", tmp_path)
    asked = Measurement(settings=("penalty/linear", "penalty/square"))
    found = {"1.0": [measured[2]["1.0", setting] for setting in asked.settings]}
    found["2.0"] = [{**row, "version": "2.0"} for row in found["1.0"]]
    found["2.0"][1]["gradients"] = [{**each, "identified": {"zero": 1.0}} for each in found["1.0"][1]["gradients"]]
    monkeypatch.setattr(measurement, "measured", lambda each, *_: found[each[1] or "1.0"])
    names = [f"{made_up}==1.0", f"{made_up}==2.0"]
    assert libraries(names, output=str(tmp_path), request=asked, diff=True) == 1
    said = capsys.readouterr().out.partition("What changed.")[2]
    assert re.search(r"2\.0 penalty/square: .*since 1\.0: .*local_reverse_kl;.* → .*zero;", said)
    assert "penalty/linear" not in said
    assert libraries([names[0], str(made_up)], output=str(tmp_path), request=asked, diff=True) == 0


def test_what_a_release_does_not_have_yet_is_not_asked(made_up):
    """A setting, a default that stood otherwise, and a release before those that are covered."""
    library = find("liger")
    early = [each.name for each in library.settings if before("0.6.3", each.since)]
    assert "ppo_loss_fn/loss_type=luspo" in early
    assert "ppo_loss_fn/loss_type=grpo" not in early
    with pytest.raises(UsageError, match="covers releases since"):
        exact_version(library, "0.5.1")
    assert not before("1.10.0", "1.9")
    assert not before("0.10.1.post1", "0.10.1")


@pytest.mark.scheduled
def test_a_history_goes_on_where_it_was_and_leaves_no_environment(made_up, tmp_path, monkeypatch):
    """2.0 doubles the square of 1.0; nothing is installed for what is recorded."""
    uploaded = {"1.0": datetime(2025, 3, 1, tzinfo=UTC), "2.0": datetime(2025, 8, 1, tzinfo=UTC)}
    monkeypatch.setattr(releases_of, "minors", lambda *_, **__: uploaded)
    asked = Measurement(history=True)
    assert releases_of.history([f"{made_up}==1.0"], asked, str(tmp_path)) == 0
    assert releases_of.history([str(made_up)], asked, str(tmp_path)) == 0
    rows = recorded.read(tmp_path / "history.jsonl")
    assert [(row["version"], row["released"]) for row in rows] == [("2.0", "2025-08-01")] * 2 + [
        ("1.0", "2025-03-01")
    ] * 2
    assert {row["setting"] for row in rows} == {"penalty/linear", "penalty/square"}
    ((earlier, later),) = releases_of.changed(rows)
    assert (earlier["version"], later["version"], later["setting"]) == ("1.0", "2.0", "penalty/square")
    assert not (tmp_path / "environments").exists()
    monkeypatch.setattr(measurement, "install", lambda *_, **__: pytest.fail("it installs"))
    assert releases_of.history([str(made_up)], asked, str(tmp_path)) == 0


@pytest.mark.scheduled
def test_a_grading_that_was_killed_goes_on_with_what_is_left_and_what_failed(made_up, tmp_path):
    """The command is killed once a row is on the disk; started again it measures the others alone."""
    command = [sys.executable, "-m", "kltest.cli", "libraries", str(made_up), "--output", str(tmp_path)]
    settings = tuple(f"penalty/{kind}" for kind in ("linear", "square", "raises"))
    command += [f"--setting={setting}" for setting in settings]
    store = tmp_path / "runs.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "penalty/square" in line:
                process.kill()
    before = store.read_bytes()
    assert 1 <= len(before.splitlines()) <= 3
    for _ in range(2):
        assert libraries([str(made_up)], output=str(tmp_path), request=Measurement(settings=settings)) == 3
    lines = [json.loads(line)["configuration"]["setting"] for line in store.read_bytes().splitlines()]
    assert store.read_bytes().startswith(before)
    assert {name: lines.count(name) for name in settings[:2]} == dict.fromkeys(settings[:2], 1)
    assert lines.count("penalty/raises") >= 2
    assert list(rows_of(tmp_path)) == [("1.0", setting) for setting in settings]


@pytest.mark.scheduled
def test_what_cannot_be_kept_is_printed_all_the_same(made_up, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise KltestError("cannot write runs.jsonl: File too large")

    monkeypatch.setattr(measurement.Store, "add", full)
    assert libraries([str(made_up)], output=str(tmp_path), request=Measurement(settings=("penalty/linear",))) == 3
    out, said = capsys.readouterr()
    assert "File too large" in said
    assert "  penalty/linear" in out


def test_a_terminated_command_ends_what_it_started(made_up, tmp_path):
    """A worker that went on would have ten minutes."""
    command = [sys.executable, "-m", "kltest.cli", "libraries", str(made_up), "--output", str(tmp_path)]
    command += ["--setting", "penalty/hangs"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "HANGS": "600"}) as process:
        try:
            until(lambda: any("scoreboard.worker" in line for line in running(made_up)))
        finally:
            process.terminate()
        assert process.wait(30) == 130
    until(lambda: not running(made_up))


@pytest.mark.scheduled
def test_measuring_needs_no_package_that_is_not_installed_beside_a_library():
    """Of kltest's own dependencies only those in NEEDED can be imported, and a loss is graded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # Rich comes with typer.
    others = {Requirement(each).name for each in project["dependencies"]} - {"torch", "rich", *NEEDED}
    assert {"pandas", "matplotlib"} <= others
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({others!r})); import kltest.scoreboard.worker, kltest; "
        "assert kltest.grade('k2-loss', environment='sequence').verdict == 'refuted'"
    )
    done = ran(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.scheduled
def test_only_an_index_that_does_not_answer_is_unreachable(made_up, tmp_path, monkeypatch):
    """A closed port answers nothing; an index that is an empty folder answers that there is no such package."""
    library = find(str(made_up))
    own = type(library)(**{**vars(library), "installs": (("--no-deps", "no-such-package-of-ours=={version}"),)})
    for key in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UnreachableError, match="kltest-made-up"):
        install(own, "1.0")
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    with pytest.raises(InstallError) as failed:
        install(own, "1.0")
    assert not isinstance(failed.value, UnreachableError)


@pytest.mark.scheduled
def test_a_library_whose_wheels_are_marked_for_another_python_is_installed_if_its_adapter_names_that(made_up, tmp_path):
    """The made-up library holds Python files alone, but its wheel says that it is for Python 3.10."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    wheel(tmp_path, "1.0", "FACTOR = 1\n" + LOSSES, tag=f"cp310-cp310-{platform}")
    calls = (("--no-deps", "--no-index", "--find-links", str(tmp_path), "kltest-made-up=={version}"),)
    marked = replace(find(str(made_up)), installs=calls)
    with pytest.raises(InstallError, match="no wheels with a matching Python"):
        install(marked, "1.0")
    installed = install(replace(marked, python="3.10"), "1.0")
    version = ran(*installed.command("-c", "import sys, kltest_made_up.losses; print(*sys.version_info[:2])")).stdout
    assert version.split() == [str(part) for part in sys.version_info[:2]]


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_is_well_made(name):
    """Names that no module could have, defaults first, links that are links, nothing imported to say so."""
    library = find(name)
    names = [setting.name for setting in library.settings]
    assert library.name == name
    assert len(set(names)) == len(names) > 0
    assert not any(all(part.isidentifier() for part in setting.split(".")) for setting in names)
    assert library.settings[0].default
    for setting in library.settings:
        assert setting.note or not setting.recipe
        assert setting.source.startswith("https://")
        assert ":" in setting.target
        assert named(f"{name}:{setting.name}") == [(f"{name}:{setting.name}", setting)]


def test_every_library_and_setting_is_listed(capsys):
    assert listing() == 0
    listed = capsys.readouterr().out
    assert "∇KL(π‖ref) is followed by rloo/defaults (on-policy)," in listed
    for name in NAMES:
        assert f"\n{name} (https://" in f"\n{listed}"
        for setting in find(name).settings:
            assert f"  {setting.name}" in listed


def test_a_listing_tells_what_was_recorded_of_settings_that_fit_patterns(measured, made_up, monkeypatch, capsys):
    *_, rows = measured
    assert listing([], ["grpo/*"]) == 0
    assert re.findall(r"^(\S+) \(https", capsys.readouterr().out, re.M) == ["trl", "torchtune"]
    monkeypatch.setattr(recorded, "read", lambda parts=("kl",): list(rows.values()) if "kl" in parts else [])
    assert listing([str(made_up)], ["penalty/l*"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^  (\S+)", out, re.M) == ["none", "penalty/linear", "penalty/leaves"]
    assert f"\n  none of the settings listed (2 of {len(find(str(made_up)).settings)}) follows ∇KL(π‖ref)\n" in out
    assert "measured in 1.0" in out
    assert re.search(r"penalty/linear \(default\)\n +bandit, current: zero; [^(]*\(KL101, KL105\)", out)
    with pytest.raises(UsageError, match="none of these libraries has such a setting"):
        listing(["trl"], ["grpo/*", "ppo/*"])


def test_a_setting_that_there_is_not_is_said_of_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("kltest.adapters.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"trl has no setting 'grpo/default'; did you mean grpo/defaults"):
        named("trl:grpo/default", to_grade=True)
    with pytest.raises(UsageError, match="trl is not installed here"):
        named("trl:grpo/defaults", to_grade=True)


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        (libraries, ["trl=="], "write trl==1.16.0"),
        (libraries, ["trll"], "did you mean trl"),
        (libraries, ["trl==one"], "'one' is no version"),
        (libraries, ["nothing.py"], "nothing.py does not exist"),
        (libraries, [str(ROOT / "tests" / "trial.py")], "has no ADAPTER"),
        (printed, "trl", "write LIBRARY:SETTING"),
        (printed, "trll:x", "did you mean trl"),
        (printed, "trl:grpo/default", "did you mean grpo/defaults"),
        (printed, "FILE:penalty/linear", "writes no programs; `kltest libraries FILE --setting"),
    ],
)
def test_a_question_wrongly_put_is_answered_before_any_work(call, given, words, made_up, tmp_path):
    if call is printed:
        given, options = given.replace("FILE", str(made_up)), {"reported": False}
    else:
        options = {"output": str(tmp_path / "never")}
    with pytest.raises(UsageError, match=re.escape(words.replace("FILE", str(made_up)))):
        call(given, **options)
    assert not (tmp_path / "never").exists()


def test_the_former_names_are_still_read_for_one_release(tmp_path):
    text = (
        ADAPTER.replace("Adapter", "Door")
        .replace("ADAPTER", "DOOR")
        .replace("    history", "    reproduction=None, history")
    )
    file = tmp_path / "door.py"
    file.write_text(text)
    with pytest.warns(DeprecationWarning, match="is now called") as warned:
        library = find(str(file))
    assert library.name == "made-up"
    assert {str(each.message).rpartition(" is now called ")[2] for each in warned} == {"Adapter", "ADAPTER"}


def test_outside_a_checkout_a_record_is_refused_before_anything_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "CHECKOUT", tmp_path)
    monkeypatch.setattr(measurement, "install", lambda *_, **__: pytest.fail("it installs"))
    with pytest.raises(UsageError, match=r"--record .*checkout"):
        libraries(["trl"], output=str(tmp_path / "results"), record=True)
    assert not (tmp_path / "results").exists()


def test_a_record_is_replaced_setting_by_setting_or_whole(measured, tmp_path):
    """Only what was asked for, in its place; a whole version, but for a library that broke down on the way."""
    rows, path = list(measured[2].values()), tmp_path / "recorded.jsonl"
    names = [row["setting"] for row in rows]
    recorded.record(rows, path)
    recorded.record([{**rows[1], "note": "again"}], path, whole=False)
    assert [row["setting"] for row in recorded.read(path)] == names
    assert [row["note"] for row in recorded.read(path)] == ["", "again", *[""] * (len(rows) - 2)]
    for worse in ({"unfinished": "the time was over"}, {"error": "it failed", "gradients": []}):
        recorded.record([rows[0], {**rows[1], "note": "worse", **worse}], path)
        assert [row["note"] for row in recorded.read(path)][:2] == ["", "again"], "what was graded stays"
    broken = absent(SimpleNamespace(name="made-up"), "1.0", "it left")
    recorded.record([rows[0], broken], path)
    assert [row["setting"] for row in recorded.read(path)] == names
    recorded.record([rows[0]], path)
    assert [row["setting"] for row in recorded.read(path)] == names[:1]


def test_rounding_is_no_news_and_a_sign_is(measured):
    rows = list(measured[2].values())
    nudged, turned = (json.loads(json.dumps(rows)) for _ in range(2))
    for row in nudged:
        for gradient in row["gradients"]:
            gradient["relative_bias"] *= 1 + 1e-7
            gradient["residual"] = 1e-13
    assert changes(rows, nudged) == []
    turned[1]["gradients"][0]["identified"] = {"reverse_kl": -1.0}
    assert len(changes(rows, turned)) == 1
    assert changes(rows, rows[1:]) == ["made-up penalty/linear: no longer there (it was in 1.0)"]
    assert changes(rows, rows[1:], [row["setting"] for row in rows[1:]]) == []
    older = [{**row, "version": "0.9"} for row in turned]
    assert changes([*rows, *older], nudged) == []
    assert len(changes([*older, *rows], nudged)) == 1


def test_every_library_is_graded_in_its_newest_release_on_schedule():
    workflow = (ROOT / ".github/workflows/libraries.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"(\S+)==newest", workflow)) == set(NAMES)
