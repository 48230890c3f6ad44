"""`kltest init`: it writes the continuous integration of a checkout and runs it; nothing that stands is changed."""

import os
import sys
import tomllib

import pytest
from typer.testing import CliRunner
from warm_python import started
from weekly import first

from kltest.cli import app, init
from kltest.errors import INTERRUPTED
from kltest.integration.losses import Held, declared, undecided
from kltest.integration.plan import Plan
from kltest.scanning.entries import MODULE
from kltest.scanning.rows import Row
from kltest.scanning.scan import scan

RIGHT = """def right_loss(logprobs, ref_logprobs, mask):
    kl = 0.5 * (logprobs - ref_logprobs) ** 2
    return (kl * mask).sum(-1).mean()
"""
WRONG = """def wrong_loss(logprobs, ref_logprobs, mask):
    delta = ref_logprobs - logprobs
    kl = delta.exp() - delta - 1
    return (kl * mask).sum(-1).mean()
"""
PROJECT = '[project]\nname = "tiny"  # a comment\n'


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder for what was scanned, and a `python` that has loaded torch, for all tests."""
    folder = tmp_path_factory.mktemp("shared")
    with started(folder):
        yield folder


@pytest.fixture
def checkout(tmp_path, shared, monkeypatch):
    """A checkout, in a folder with a space in its name, with a right loss and a wrong one."""
    monkeypatch.setenv("KLTEST_SCAN_CACHE", str(shared / "cache"))
    monkeypatch.setattr(sys, "executable", str(shared / "python"))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    folder = tmp_path / "my checkout"
    (folder / "tests").mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "losses.py").write_text(f"{RIGHT}\n\n{WRONG}", encoding="utf-8")
    return folder


def ran(*arguments):
    result = CliRunner().invoke(app, ["init", *map(str, arguments)])
    return result.exit_code, result


def tree(folder):
    """Return every file of a folder with its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def answering(monkeypatch, *answers):
    """Make standard input a terminal on which these answers are given."""
    lines = iter(answers)
    monkeypatch.setattr(init, "_is_terminal", lambda: True)
    monkeypatch.setattr(init, "_answer", lambda: next(lines))


def test_it_writes_what_holds_a_checkout(checkout):
    code, result = ran("--yes")
    assert code == 0, result.output
    assert result.stdout.splitlines()[-1] == "green with 1 expected failure and a baseline of 1 finding"
    after = tree(checkout)
    written = (
        ".github/workflows/kltest.yml",
        ".pre-commit-config.yaml",
        "kltest-scan.json",
        "tests/test_kl_gradient.py",
    )
    assert {str(path) for path in after} == {*written, "losses.py", "pyproject.toml"}
    text = (checkout / "pyproject.toml").read_text("utf-8")
    assert text.startswith(PROJECT)
    table = tomllib.loads(text)["tool"]["kltest"]
    right, wrong = table["targets"]
    assert right == {"target": "losses.py:right_loss", "expect": "local_reverse_kl"}
    assert (wrong["target"], wrong["expect"]) == ("losses.py:wrong_loss", "local_reverse_kl")
    assert wrong["expected-failures"]["KL102"].startswith("found by kltest init: The gradient is that of KL(ref‖π)")
    assert table["scan"] == {"baseline": "kltest-scan.json", "exclude": ["tests/*"]}


@pytest.mark.scheduled
def test_a_second_run_changes_nothing_and_what_was_written_is_red_once_the_right_loss_is_wrong(checkout):
    assert ran("--yes")[0] == 0
    after = tree(checkout)
    code, result = ran("--yes")
    assert (code, tree(checkout)) == (0, after)
    assert "nothing to write" in result.stdout
    (checkout / "losses.py").write_text(f"{WRONG.replace('wrong_', 'right_')}\n\n{WRONG}", encoding="utf-8")
    assert init._run(Plan("", "")) == "the scan (exit code 1) and the test (exit code 1)"


@pytest.mark.scheduled
def test_of_a_right_checkout_no_failure_is_expected(checkout):
    (checkout / "losses.py").write_text(RIGHT, encoding="utf-8")
    (checkout / "pyproject.toml").unlink()
    code, result = ran("--yes", ".")
    assert code == 0, result.output
    assert result.stdout.splitlines()[-1] == "green"
    table = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["tool"]["kltest"]
    assert table["targets"] == [{"target": "losses.py:right_loss", "expect": "local_reverse_kl"}]
    assert "baseline" not in table["scan"]
    assert not (checkout / "kltest-scan.json").exists()


@pytest.mark.scheduled
def test_a_dry_run_shows_and_writes_nothing(checkout):
    before = tree(checkout)
    code, result = ran("--dry-run", "--repository", "https://example.com/kltest", "--revision", "v1")
    assert (code, tree(checkout)) == (0, before)
    assert 'python -m pip install "kltest @ git+https://example.com/kltest@v1"' in result.stdout
    assert "rev: v1" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.endswith("with 1 expected failure and a baseline of 1 finding; nothing was written")


def test_without_a_terminal_it_does_not_ask_but_says_what_to_type(checkout):
    before = tree(checkout)
    code, result = ran()
    assert (code, tree(checkout)) == (2, before)
    assert "type kltest init --yes" in result.stderr


@pytest.mark.scheduled
@pytest.mark.parametrize("answers", [("yes", "n"), ("no",), ("yes", "")])
def test_only_yes_writes(checkout, answers, monkeypatch):
    before = tree(checkout)
    answering(monkeypatch, *answers, "")
    code, result = ran()
    assert (code, tree(checkout)) == (0, before)
    assert "nothing was written" in result.stdout


@pytest.mark.scheduled
def test_without_the_expected_failures_it_is_red(checkout, monkeypatch):
    answering(monkeypatch, "n", "y")
    code, result = ran()
    assert code == 1
    assert result.stdout.splitlines()[-1] == "red: the scan (exit code 1) and the test (exit code 1)"
    table = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["tool"]["kltest"]
    assert all("expected-failures" not in target for target in table["targets"])
    assert not (checkout / "kltest-scan.json").exists()


def test_nothing_that_stands_is_changed(checkout):
    workflow = checkout / ".github" / "workflows" / "ci.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("jobs: {a: {steps: [{run: kltest grade}]}}\n", encoding="utf-8")
    (checkout / ".pre-commit-config.yaml").write_text("repos: []\n", encoding="utf-8")
    (checkout / "tests" / "test_kl_gradient.py").write_text("def test(): pass\n", encoding="utf-8")
    project = f"{PROJECT}[tool.kltest]\ntargets = ['losses.py:right_loss']\nexpect = 'local_reverse_kl'\n"
    (checkout / "pyproject.toml").write_text(project, encoding="utf-8")
    before = tree(checkout)
    (checkout / ".pre-commit-config.yaml").unlink()
    code, result = ran("--dry-run")
    assert code == 0
    assert "would write .pre-commit-config.yaml; nothing" in result.stdout
    for left in ("pyproject.toml has [tool.kltest]", "test_kl_gradient.py stands", "ci.yml runs kltest"):
        assert f"{left}: left alone" in result.stdout
    (checkout / ".pre-commit-config.yaml").write_text("repos: []\n", encoding="utf-8")
    code, result = ran("--yes")
    assert (code, tree(checkout)) == (0, before)


@pytest.mark.scheduled
def test_hooks_that_stand_are_left_alone_and_the_lines_are_shown(checkout):
    (checkout / ".pre-commit-config.yaml").write_text("repos: []\n", encoding="utf-8")
    _, result = ran("--dry-run")
    assert ".pre-commit-config.yaml stands; add to it:" in result.stdout
    assert "id: kltest-scan" in result.stdout


def test_line_ends_and_a_missing_last_one_are_kept(checkout):
    (checkout / "pyproject.toml").write_bytes(PROJECT.replace("\n", "\r\n").strip().encode())
    plan = Plan("https://example.com", "v1")
    plan.make([], "")
    text = next(file.text for file in plan.files if file.path.name == "pyproject.toml")
    assert text.count("\n") == text.count("\r\n")
    assert tomllib.loads(text)["project"] == {"name": "tiny"}


@pytest.mark.parametrize(
    ("text", "said"),
    first(1, [("[tool", "is not valid TOML"), ("tool = {}\n", "takes no table at its end; write into it yourself")]),
)
def test_a_configuration_that_cannot_be_added_to(checkout, text, said):
    (checkout / "pyproject.toml").write_text(text, encoding="utf-8")
    before = tree(checkout)
    code, result = ran("--yes")
    assert (code, tree(checkout)) == (2, before)
    assert said in result.stderr


@pytest.mark.parametrize(("name", "said"), [("nowhere", "is not there"), ("losses.py", "is no folder")])
def test_what_is_no_folder(checkout, name, said):
    code, result = ran(name, "--yes")
    assert code == 2
    assert said in result.stderr


def test_a_checkout_without_a_term(checkout):
    (checkout / "losses.py").write_text("def loss(x):\n    return x.mean()\n", encoding="utf-8")
    before = tree(checkout)
    code, result = ran("--yes")
    assert (code, tree(checkout)) == (5, before)
    assert "no KL term" in result.stderr


def test_a_checkout_that_cannot_be_written(checkout, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    code, result = ran("--yes")
    assert code == 2
    assert "nothing can be written" in result.stderr
    assert "--dry-run" in result.stderr


@pytest.mark.scheduled
def test_a_file_that_cannot_be_written_is_named_with_those_that_were(checkout):
    (checkout / ".github").write_text("no folder", encoding="utf-8")
    code, result = ran("--yes")
    assert code == 2
    assert ".github" in result.stderr
    assert "written: pyproject.toml, kltest-scan.json, tests/test_kl_gradient.py" in result.stderr


@pytest.mark.parametrize("when", first(1, ["_looked", "_run"]))
def test_an_interrupt_says_what_was_written(checkout, when, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(init, when, interrupted)
    code, result = ran("--yes")
    assert code == INTERRUPTED
    left = "nothing was written" if when == "_looked" else "written: pyproject.toml, kltest-scan.json"
    assert f"interrupted; {left}" in result.stderr


@pytest.mark.scheduled
def test_what_a_comment_declares_is_declared_and_nothing_that_was_merely_found(checkout):
    text = WRONG.replace("    kl =", "    # kltest: expect=local_forward_kl\n    kl =").replace("wrong", "meant")
    (checkout / "losses.py").write_text(f"{WRONG}\n\n{text}", encoding="utf-8")
    losses = {loss.text: loss.expect for loss in declared(scan(".").rows)}
    assert losses == {"losses.py:wrong_loss": "local_reverse_kl", "losses.py:meant_loss": "local_forward_kl"}


@pytest.mark.scheduled
def test_a_term_that_only_comes_to_rewards_is_placed_there(checkout):
    reward = "def shaped_rewards(scores, logprobs, ref_logprobs, kl_coef):\n"
    reward += "    rewards = scores[:, None] - kl_coef * (logprobs - ref_logprobs)\n    return rewards\n"
    (checkout / "losses.py").write_text(reward, encoding="utf-8")
    (loss,) = declared(scan(".").rows)
    assert loss.placed == {"placement": "reward"}


@pytest.mark.scheduled
def test_a_whole_loss_with_its_kl_in_the_reward_is_held_and_one_that_logs_its_number(checkout):
    (checkout / "losses.py").write_text(
        "def whole_loss(rewards, logprobs, ref_logprobs, mask, beta=0.04):\n"
        "    kl = (logprobs - ref_logprobs).detach() * mask\n"
        "    rewards = rewards - beta * kl.sum(-1)\n"
        "    return -(rewards[:, None] * logprobs * mask).sum(-1).mean()\n\n\n"
        "def logged_loss(logprobs, ref_logprobs, advantages, mask, beta=0.04):\n"
        "    kl = (0.5 * (logprobs - ref_logprobs) ** 2).sum(-1).mean()\n"
        '    return -(logprobs * advantages[:, None] * mask).sum() + beta * kl, {"kl": kl.item()}\n',
        encoding="utf-8",
    )
    code, result = ran("--dry-run")
    assert code == 0
    assert 'target = "losses.py:whole_loss"' in result.stdout
    assert 'target = "losses.py:logged_loss"' in result.stdout
    assert "not held" not in result.stdout
    assert "(3 of 2)" not in result.stderr
    owner = result.stdout.splitlines()[-2]
    assert "replace OWNER in 2 files (.github/workflows/kltest.yml, .pre-commit-config.yaml)" in owner


def test_what_the_scan_did_not_decide_is_listed_once_a_function_and_not_if_it_is_held():
    given = {"file": "a.py", "line": 1, "last": 2, "place": "loss", "variant": "", "formula": ""}
    rows = [
        Row(**given, spot="a.py:2", function="held", state="not run", why="odd"),
        Row(**given, spot="a.py:4", function="left", state="not run", why="odd\nlong"),
        Row(**given, spot="a.py:5", function="left", state="failed", why="other"),
        Row(**given, spot="a.py:8", function=MODULE, state="inconclusive"),
        Row(**given, spot="a.py:9", function="fine", state="passed"),
    ]
    left = undecided(rows, [Held("a.py:held", "reverse_kl")])
    assert left == {"a.py:left": "not run by the scan: odd", "a.py:8": "inconclusive"}
