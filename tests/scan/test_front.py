"""What is around a scan: declarations, excuses, baselines, changed lines, exit codes, SARIF and bad input.

Nothing is graded here: reports are those that a gradient is known to give.
"""

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from kltest.cli.application import app
from kltest.scanning.judge import Judge, filled
from kltest.scanning.rows import Row
from kltest.scanning.search import Store
from kltest.scanning.sources import Source, sources

K2 = "def loss(logp, ref_logp):\n    return ((logp - ref_logp) ** 2 / 2).mean()\n"
HELPED = "from means import mean\n\n\ndef loss(logp, ref_logp):\n    return mean((logp - ref_logp) ** 2 / 2)\n"
MEAN = "def mean(values):\n    return values.mean()\n"
RIGHT, LOCAL, ZERO = {"reverse_kl": 1.0}, {"local_reverse_kl": 0.5}, {"zero": 1.0}


def report(identified, codes=(), verdict="refuted", warnings=()):
    rows = [{"environment": "ragged", "sampler": sampler, "identified": identified} for sampler in ("current", "stale")]
    levels = [(code, "error") for code in codes] + [(code, "warning") for code in warnings]
    checks = [{"code": code, "status": "fail", "level": level, "message": f"{code} fails."} for code, level in levels]
    return {"verdict": verdict, "gradients": rows, "checks": checks, "error": "it raised"}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder with one right term; `known` is the report of all terms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLTEST_SCAN_CACHE", str(tmp_path / ".cache"))
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    (tmp_path / "code.py").write_text(K2)
    known = {"report": report(RIGHT)}

    def judged(self, rows):
        for row in rows:
            if row.why:
                row.state = "not run"
                yield row
            else:
                yield filled(row, known["report"])

    monkeypatch.setattr(Judge, "judged", judged)
    return known


def scan(*arguments):
    done = CliRunner().invoke(app, ["scan", *map(str, arguments)])
    return done.exit_code, done.output


def rows(*arguments):
    return json.loads(scan("--output", "json", *arguments)[1])["terms"]


def git(*arguments, at="."):
    command = ["git", "-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=at).stdout


UNNAMED, NOT_RUN = (
    report(None, ["KL105"]),
    "def loss(logp, ref_logp):\n    return torch.load((logp - ref_logp).square())\n",
)
EXITS = {
    "right": (K2, report(RIGHT), 0, 0),
    "a multiple": (K2, report({"reverse_kl": 3.0}, ["KL106"]), 0, 0),
    "a next-token part": (K2, report(LOCAL, ["KL201"]), 0, 0),
    "right, with a warning": (K2, report(RIGHT, warnings=["KL507"]), 0, 0),
    "the other sign": (K2, report({"reverse_kl": -1.0}), 1, 1),
    "another gradient": (K2, report({"forward_kl": 1.0}, ["KL102"]), 1, 1),
    "right, and an error": (K2, report(RIGHT, ["KL505"]), 1, 1),
    "zero": (K2, report(ZERO), 1, 1),
    "unnamed": (K2, UNNAMED, 0, 4),
    "failed": (K2, report(None, verdict="error"), 0, 4),
    "not run": (NOT_RUN, UNNAMED, 0, 4),
    "as declared": (f"{K2}  # kltest: expect=zero".replace("\n  #", "  #"), report(ZERO, verdict="confirmed"), 0, 0),
    "not as declared": (f"{K2}  # kltest: expect=zero".replace("\n  #", "  #"), report(RIGHT), 1, 1),
    "not decided": (
        f"{K2}  # kltest: expect=zero".replace("\n  #", "  #"),
        report(RIGHT, verdict="inconclusive"),
        0,
        4,
    ),
    "no term": ("x = 1\n", None, 5, 5),
}


@pytest.mark.parametrize("name", EXITS)
def test_the_exit_code_is_what_the_terms_follow(tree, name):
    text, tree["report"], code, strict = EXITS[name]
    Path("code.py").write_text(text)
    assert scan()[0] == code
    assert scan("--strict")[0] == strict


def test_what_is_only_logged_is_listed_if_asked_for_and_held_to_its_value_alone(tree):
    Path("code.py").write_text(
        f"{K2}\n\ndef step(logp, ref_logp, stats):\n    stats['kl'] = (logp - ref_logp).mean().item()\n"
    )
    value, passed = [{"sampler": "current", "matches": "kl"}], [{"code": "KL601", "status": "pass", "level": "error"}]
    tree["report"] = {**report(ZERO, ["KL101", "KL509"]), "value": value}
    tree["report"]["checks"] += passed
    assert scan()[1].count("code.py:6") == 0
    code, text = scan("--logged")
    assert (code, "logs KL(π‖ref)" in text) == (1, True), "the other term is a finding"
    assert {row["place"]: (row["status"], row["errors"]) for row in rows("--logged")} == {
        "loss": ("finding", ["KL101", "KL509"]),
        "logged": ("passed", []),
    }
    tree["report"] = {**report(ZERO, ["KL101", "KL604"]), "value": [{"sampler": "current", "matches": None}]}
    assert rows("--logged")[1]["errors"] == ["KL604"]
    tree["report"] = {**report(ZERO), "value": []}  # nobody could compare it
    assert rows("--logged")[1]["status"] == "inconclusive"


def test_comments_on_a_term_or_above_it_declare_and_excuse(tree):
    tree["report"] = report(RIGHT, ["KL505", "KL204"])
    line = "    return ((logp - ref_logp) ** 2 / 2).mean()"
    Path("code.py").write_text(
        K2.replace(line, f"    # kltest: ignore[KL505] no padding\n{line}  # kltest: ignore[KL204] alone")
    )
    (row,) = rows()
    assert (row["errors"], row["ignored"]) == ([], {"KL505": "no padding", "KL204": "alone"})
    # A comment behind the statement before, and one in a text, are not on the term.
    Path("code.py").write_text(
        K2.replace(line, f"    a = 1  # kltest: ignore[KL505] b\n    c = '# kltest: ignore[KL204] d'\n{line}")
    )
    code, text = scan()
    assert (code, "code.py:2: # kltest: ignore[KL505] b stands on no KL term" in text) == (1, True), text
    Path("code.py").write_text(K2.replace(line, f"{line}  # kltest: ignore[KL505, KL506] why"))
    assert "code.py:2: KL506 is excused, and does not fail" in scan()[1]


TWO = """def kl(logp, ref_logp, kind):
    d = logp - ref_logp  # kltest: COMMENT
    if kind == "k2":
        return d ** 2 / 2
    return d.abs()
"""


@pytest.mark.parametrize(
    ("comment", "declared"),
    [
        ("expect=zero", ["zero", "zero"]),
        ("[k2] expect=zero", ["zero", None]),
        ("[kind='k2'] expect=zero", ["zero", None]),
        ("[helper, kind otherwise]expect=zero", [None, "zero"]),
        ("[k] expect=zero", [None, None]),
        ("[reward] expect=zero", [None, None]),
    ],
)
def test_a_comment_may_speak_of_one_configuration_of_a_term(tree, comment, declared):
    Path("code.py").write_text(TWO.replace("COMMENT", comment))
    assert [(row["variant"], row["declared"]) for row in rows()] == [
        ("kind='k2'", declared[0]),
        ("kind otherwise", declared[1]),
    ]
    told = f"code.py:2: # kltest: {comment} names no configuration" in scan()[1]
    assert told == (declared == [None, None])


def test_an_excuse_for_one_configuration_leaves_the_others(tree):
    tree["report"] = report(RIGHT, ["KL301"])
    Path("code.py").write_text(TWO.replace("COMMENT", "[k2] ignore[KL301] samples are fresh"))
    assert [row["errors"] for row in rows()] == [[], ["KL301"]]
    Path("code.py").write_text(TWO.replace("COMMENT", "[k2] ignore[KL102] why"))
    assert "code.py:2: KL102 is excused, and does not fail" in scan()[1]


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("expect=forwrd_kl", "forward_kl"),
        ("expect=", "write expect=NAME"),
        ("ignore[KL999] why", "there is no check 'KL999'"),
        ("ignore[KL201]", "without a reason"),
        ("ignored[KL201] why", "ignore[CODE]"),
    ],
)
def test_a_comment_that_says_nothing_known_is_told_with_its_line(tree, comment, said):
    Path("code.py").write_text(f"{K2[:-1]}  # kltest: {comment}\n")
    code, text = scan()
    assert (code, text.count("\n")) == (2, 1), text
    assert text.startswith("kltest: code.py:2: ")
    assert said in text


def test_the_configuration_declares_excuses_and_leaves_out_by_file(tree):
    Path("pyproject.toml").write_text(
        '[tool.kltest.scan]\nexclude = ["tests/*"]\nbaseline = "known.json"\n'
        'expect = { "losses/*.py" = "zero" }\nignore = { "code.py" = { KL505 = "no padding" } }\n'
    )
    Path("known.json").write_text('{"terms": []}')
    for folder in ("tests", "losses"):
        Path(folder).mkdir()
        Path(folder, "more.py").write_text(K2)
    tree["report"] = report(RIGHT, ["KL505"])
    told = {row["file"]: (row["declared"], row["ignored"]) for row in rows()}
    assert told == {"code.py": (None, {"KL505": "no padding"}), "losses/more.py": ("zero", {})}
    os.chdir("losses")  # patterns and files are relative to the configuration, wherever it is asked
    assert rows()[0]["declared"] == "zero"


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ("expext = {}", 3, "did you mean expect?"),
        ('expect = { "*.py" = "forwrd_kl" }', 3, "forward_kl"),
        ('expect = "forward_kl"', 3, "give gradients by files"),
        ('exclude = []\nignore = { "*.py" = { KL999 = "x" } }', 4, "there is no check 'KL999'"),
        ('ignore = { "*.py" = { KL505 = "" } }', 3, "without a reason"),
        ('ignore = { KL505 = "x" }', 3, "give reasons by files and codes"),
        ('exclude = "tests"', 3, "give a list"),
        ("baseline = 1", 3, "give the path"),
    ],
)
def test_a_wrong_configuration_is_told_with_its_line(tree, table, line, said):
    Path("pyproject.toml").write_text(f"[project]\n[tool.kltest.scan]\n{table}\n")
    code, text = scan()
    assert (code, text.count("\n")) == (2, 1), text
    assert f"pyproject.toml, line {line}: " in text
    assert said in text


def test_a_baseline_is_made_used_renewed_and_told_when_it_is_stale(tree):
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    assert scan("--output", "json:known.json")[0] == 1
    Path("code.py").write_text("\n\n" + K2)  # lines move
    assert scan("--baseline", "known.json")[0] == 0
    assert scan("--baseline", "known.json", "--output", "json:known.json")[0] == 0  # renewed from itself
    tree["report"] = report({"forward_kl": 1.0}, ["KL102", "KL505"])
    assert scan("--baseline", "known.json")[0] == 1  # one more error is news
    tree["report"] = report(RIGHT)
    code, text = scan("--baseline", "known.json")
    assert code == 0
    assert "note: code.py: loss (loss): baseline entry KL102 no longer occurs" in " ".join(text.split())
    Path("broken.json").write_text("[]")
    assert scan("--baseline", "broken.json")[0] == 2


# Changed lines.


@pytest.fixture
def repository(tree):
    Path("code.py").write_text(HELPED)
    Path("means.py").write_text(MEAN)
    Path(".gitignore").write_text(".cache\nclone\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    return tree


def changed(reference="HEAD"):
    code, text = scan("--changed-since", reference)
    return code, int(text.splitlines()[-1].replace("no KL", "0").split()[0])


def test_only_what_changed_is_graded(repository):
    assert changed() == (0, 0)
    Path("new file.py").write_text(K2)
    assert changed() == (1, 1), "a file that git does not know yet is new"
    Path("new file.py").unlink()
    Path("means.py").write_text(MEAN.replace("values.mean()", "values.sum()"))
    assert changed() == (1, 1), "a helper of the term is part of it"
    git("checkout", ".")
    git("mv", "code.py", "moved.py")
    assert changed() == (0, 0), "a file that is only renamed has not changed"
    Path("moved.py").write_text(HELPED.replace("** 2", "** 4"))
    assert changed() == (1, 1)
    Path("sub").mkdir()
    os.chdir("sub")
    assert scan("..", "--changed-since", "HEAD")[0] == 1


def test_what_others_changed_since_is_not_looked_at(repository):
    git("checkout", "-b", "own")
    Path("own.txt").write_text("x")
    git("add", ".")
    git("commit", "-m", "own")
    git("checkout", "main")
    Path("code.py").write_text(HELPED.replace("** 2", "** 4"))
    git("commit", "-am", "theirs")
    git("checkout", "own")
    assert changed("main") == (0, 0)


def test_git_that_knows_nothing_is_said_in_one_line(repository, tmp_path, monkeypatch):
    for reference in ("nowhere", "--output=x"):
        code, text = scan(f"--changed-since={reference}")
        assert (code, text.count("\n")) == (2, 1)
        assert f"git knows no commit {reference}" in text
    git("commit", "--allow-empty", "-m", "second")
    git("clone", "--depth", "1", f"file://{tmp_path}", "clone")
    os.chdir("clone")
    code, text = scan("--changed-since", "HEAD~1")
    assert (code, "the clone is shallow" in text) == (2, True)
    assert changed("HEAD") == (0, 0)
    os.chdir("..")
    with monkeypatch.context() as patched:
        patched.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        outside = tmp_path / "clone" / ".git"  # a folder of git is no tree of files
        assert "is in no repository" in scan(outside, "--changed-since", "HEAD")[1]
        patched.setenv("PATH", "")
        assert "needs git" in scan("--changed-since", "HEAD")[1]


# SARIF and annotations.

TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
"""What code scanning of GitHub asks of SARIF 2.1.0, stricter than the standard: nothing else may stand there."""


def only(required, **optional):
    named = {**required, **optional}
    return {"type": "object", "required": list(required), "properties": named, "additionalProperties": False}


LEVEL, LINE = {"enum": ["error", "warning", "note"]}, {"type": "integer", "minimum": 1}
RULE = only(
    {
        "id": {"pattern": r"^KL\d{3}$"},
        "name": {"type": "string"},
        "shortDescription": TEXT,
        "fullDescription": TEXT,
        "help": TEXT,
        "defaultConfiguration": only({"level": LEVEL}),
    }
)
PLACE = only(
    {
        "artifactLocation": only({"uri": {"pattern": r"^(file:///)?[\w%./~-]+$"}}, uriBaseId={"const": "%SRCROOT%"}),
        "region": only({"startLine": LINE, "endLine": LINE}),
    }
)
LOCATION = only({"physicalLocation": PLACE, "logicalLocations": {"type": "array", "minItems": 1}})
RESULT = only(
    {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": LEVEL,
        "message": TEXT,
        "locations": {"type": "array", "items": LOCATION, "minItems": 1, "maxItems": 1},
        "partialFingerprints": only({"kltest/1": {"pattern": "^[0-9a-f]{32}$"}}),
    }
)
DRIVER = only({"name": {"const": "kltest"}, "version": {"type": "string"}, "rules": {"type": "array", "items": RULE}})
RUN = only(
    {
        "tool": only({"driver": DRIVER}),
        "originalUriBaseIds": only({"%SRCROOT%": only({"description": TEXT})}),
        "results": {"type": "array", "items": RESULT, "maxItems": 5000},
        "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    }
)
SARIF = only(
    {
        "$schema": {"const": "https://json.schemastore.org/sarif-2.1.0.json"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": RUN, "minItems": 1, "maxItems": 1},
    }
)


def sarif():
    text = scan("--output", "sarif")[1]
    jsonschema.validate(json.loads(text), SARIF)
    (run,) = json.loads(text)["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        region = result["locations"][0]["physicalLocation"]["region"]
        assert region["startLine"] <= region["endLine"]
    return run["results"]


def places(results):
    found = [each["locations"][0]["physicalLocation"] for each in results]
    return [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in found]


def test_sarif_is_what_code_scanning_reads(tree, monkeypatch):
    assert sarif() == []
    tree["report"] = report({"forward_kl": 1.0}, ["KL102", "KL204"], warnings=["KL507"])
    Path("a folder").mkdir()
    Path("code.py").rename("a folder/é.py")
    first = sarif()
    assert [(each["ruleId"], each["level"]) for each in first] == [
        ("KL102", "error"),
        ("KL204", "error"),
        ("KL507", "warning"),
    ]
    assert set(places(first)) == {("a%20folder/%C3%A9.py", 2)}
    Path("a folder/é.py").write_text("\n# moved\n\n" + K2)
    second = sarif()
    assert set(places(second)) == {("a%20folder/%C3%A9.py", 5)}
    fingerprints = [[each["partialFingerprints"] for each in results] for results in (first, second)]
    assert fingerprints[0] == fingerprints[1]
    assert len({json.dumps(each) for each in fingerprints[0]}) == 3
    monkeypatch.setenv("GITHUB_WORKSPACE", str(Path.cwd()))  # the root of the checkout, wherever kltest is called
    os.chdir("a folder")
    assert set(places(sarif())) == {("a%20folder/%C3%A9.py", 5)}
    assert "file=a folder/é.py,line=5,endLine=5," in scan("--output", "github")[1]


def test_annotations_say_what_fails_in_words(tree):
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    tree["report"]["checks"][0]["message"] = "It is the other direction. Found bandit: x."
    follows = "KL term in the loss, loss: follows forward_kl; under a stale sampler forward_kl."
    assert scan("--output", "github")[1].endswith(f"title=kltest KL102::{follows} KL102: It is the other direction.\n")
    assert sarif()[0]["message"]["text"] == f"It is the other direction. {follows} Found bandit: x."
    tree["report"] = UNNAMED  # which is held against nobody
    text = scan("--output", "github")[1]
    assert "::warning file=code.py,line=2,endLine=2,title=kltest unnamed::" in text
    assert "follows an unnamed gradient; under a stale sampler an unnamed gradient.\n" in text
    assert "KL105" not in scan()[1]


def test_no_more_results_than_are_read(tree, monkeypatch):
    monkeypatch.setattr("kltest.render.sarif.MOST_RESULTS", 2)
    tree["report"] = report({"forward_kl": 1.0}, ["KL102", "KL204"], warnings=["KL507"])
    assert [each["level"] for each in sarif()] == ["error", "error"]


def test_a_term_of_a_notebook_is_annotated_on_its_line_of_the_file(tree):
    Path("code.py").unlink()
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    lines = ["%%bash\n", "ls\n"], ["%pip install x\n", *K2.splitlines(keepends=True)]
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": each} for each in lines]
    Path("a.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1))
    line = next(
        n
        for n, text in enumerate(Path("a.ipynb").read_text().splitlines(), 1)
        if "ref_logp)" in text and "return" in text
    )
    assert places(sarif()) == [("a.ipynb", line)]
    assert f"file=a.ipynb,line={line},endLine={line}," in scan("--output", "github")[1]
    assert "a.ipynb:cell 2:3" in scan()[1]
    Path("a.ipynb").write_text(json.dumps({"cells": cells}))  # a file of one line
    assert places(sarif()) == [("a.ipynb", 1)]


def answering(monkeypatch, *answers):
    """Let the judge answer at once, in this order, without a child; returns the answers that are left."""
    left = list(answers)

    def grade(*_):
        return left.pop(0)
        yield

    monkeypatch.setattr("kltest.scanning.judge.grade", grade)
    return left


def row(source="x", **more):
    return Row("a.py", 1, 1, "a.py:1", "f", "loss", "", "", source, **more)


def test_a_term_that_stands_twice_is_graded_once_and_a_lasting_report_is_kept(tmp_path, monkeypatch):
    lasting, passing = ({**report(RIGHT), "lasts": lasts} for lasts in (True, False))
    left = answering(monkeypatch, lasting, passing)
    with Judge(1, 60.0, Store(tmp_path)) as judge:
        done = list(judge.judged([row(), row("y"), row("y"), row(why="no arithmetic")]))
    assert sorted(each.status for each in done) == ["not run", "passed", "passed", "passed"]
    assert (left, judge.asked, judge.done) == ([], 3, 3)
    assert len(list(tmp_path.glob("*.json"))) == 1
    left = answering(monkeypatch, passing)
    with Judge(1, 60.0, Store(tmp_path)) as judge:
        assert {each.status for each in judge.judged([row(), row("y")])} == {"passed"}
    assert left == []


def test_ctrl_c_shows_and_keeps_what_was_graded(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLTEST_SCAN_CACHE", "kept")
    for name, power in (("a.py", 2), ("b.py", 4)):
        Path(name).write_text(K2.replace("** 2", f"** {power}"))
    answering(monkeypatch, *[{**report(RIGHT), "lasts": True}] * 2)
    with monkeypatch.context() as patched:
        patched.setattr("kltest.cli.scan._advance", interrupt)
        code, text = scan("--output", "json:scan.json")
    assert (code, "interrupted; 0 of 1 variants found so far not graded; the rest is kept" in text) == (130, True)
    assert [term["status"] for term in json.loads(Path("scan.json").read_text())["terms"]] == ["passed"]
    assert len(list(Path("kept").glob("*.json"))) == 1
    assert scan()[0] == 0
    assert len(list(Path("kept").glob("*.json"))) == 3  # the other one, and what was searched


# Bad input.


def test_what_cannot_be_read_is_a_line_and_the_rest_goes_on(tree, tmp_path):
    good = K2.encode()
    files = {
        "syntax.py": b"def f(:\n",
        "latin.py": b"# \xe9t\xe9\n" + good,
        "utf16.py": K2.encode("utf-16"),
        "null.py": good + b"\x00",
        "coding.py": b"# coding: nonsense\n" + good,
        "deep.py": b"x = " + b"-" * 200_000 + b"1\n",
        "broken.ipynb": b'{"cells": [',
        "list.ipynb": b"[1]",
    }
    for name, content in files.items():
        Path(name).write_bytes(content)
    Path("declared.py").write_bytes(b"# coding: latin-1\n# \xe9t\xe9\n" + good)
    Path("marked.py").write_bytes(b"\xef\xbb\xbf" + good)
    Path("empty.ipynb").write_text("{}")
    Path("gone.py").symlink_to("nowhere.py")
    Path("loop.py").symlink_to("loop.py")
    Path("circle").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo("pipe.py")
    Path("large.py").write_bytes(b"#" * 5_000_001)
    code, text = scan("--output", "json")
    found = json.loads(text)
    assert code == 0
    assert {row["file"] for row in found["terms"]} == {"code.py", "declared.py", "marked.py"}
    wrong = {*files, "gone.py", "loop.py", "pipe.py", "large.py"}
    assert {line.partition(":")[0] for line in found["left_out"]} == wrong
    assert len(found["left_out"]) == len(wrong)
    assert all("\n" not in line for line in found["left_out"])
    told = scan()[1]
    assert sum(line.startswith("not read: ") for line in told.splitlines()) == len(wrong)


def test_a_file_that_is_no_python_and_one_that_is_missing(tree, tmp_path):
    Path("notes.txt").write_text("x")
    assert scan("notes.txt", "code.py")[0] == 0
    code, text = scan("notes.txt")
    assert (code, "not read: notes.txt: neither Python" in text) == (5, True)
    code, text = scan("code.py", "missing")
    assert (code, text) == (2, "kltest: there is no file or folder missing\n")


def test_a_long_generated_file_is_read(tree):
    Path("code.py").write_text("".join(f"x_{n} = 1\n" for n in range(50_000)) + K2)
    (row,) = rows()
    assert row["line"] == 50_002


def test_a_report_that_cannot_be_written_is_told_before_the_work(tree, monkeypatch):
    monkeypatch.setattr("kltest.scanning.scan.scan", lambda *_, **__: pytest.fail("it began"))
    for wrong in ("xml", "json:", "json:missing/x.json", "json:."):
        code, text = scan("--output", wrong)
        assert (code, text.count("\n")) == (2, 1), text


def test_a_cache_that_cannot_be_written_saves_nothing(tree, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv("KLTEST_SCAN_CACHE", "file/below")
    assert scan()[0] == 0


def test_a_line_of_a_notebook_past_its_end_is_its_last(tmp_path):
    source = Source(tmp_path, "", None, [(1, 1, 5)])
    assert (source.line(9), source.place(9)) == (5, f"{tmp_path}:cell 1:1")


def test_a_folder_without_permission_is_a_line(tree, monkeypatch):
    if os.getuid() == 0:
        refused = PermissionError(13, "Permission denied")
        monkeypatch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(refused))
    else:
        Path("code.py").chmod(0)
    left_out = []
    assert list(sources([Path()], left_out)) == []
    assert left_out == ["code.py: Permission denied"]
