"""The example project as a new user tries it: by its own tests, by a bare `kltest grade`, and by the action's steps."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from processes import ran
from warm_python import started
from weekly import first

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
GUIDES = ROOT / "docs" / "guides"
PAGE, SCAN = (GUIDES.joinpath(name).read_text(encoding="utf-8") for name in ("continuous-integration.md", "scan.md"))
SCAN_BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", SCAN, flags=re.DOTALL)]
# A token's own log-ratio in place of its answer's, and the other direction's gradient: what a pull request may do.
BREAKS = {"log_ratio.sum(dim=-1).square() / 2": "(-log_ratio).exp() - 1 + log_ratio"}


@pytest.fixture(scope="module", autouse=True)
def commands(tmp_path_factory):
    """`python` and `kltest`."""
    folder = tmp_path_factory.mktemp("bin")
    with started(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield


@pytest.fixture
def project(tmp_path):
    """A copy of the project, with nothing of this checkout around it."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "tests" / "example_project", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def change(project, replacements):
    path = project / "tiny_rl" / "losses.py"
    text = path.read_text()
    for old, new in replacements.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)


def run(project, *command, **environment):
    """A command in the project, as a user's shell runs it."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "PYTEST_"))}
    return ran(*command, cwd=project, env={**given, **environment}, encoding="utf-8")


@pytest.mark.scheduled
def test_the_projects_own_tests_pass_and_fail_as_they_should(project):
    command = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = run(project, *command)
    assert done.returncode == 0, done.stdout
    assert "2 xfailed" in done.stdout
    assert "confirmed  token_kl" in done.stdout
    change(project, BREAKS)
    done = run(project, *command)
    assert done.returncode == 1
    assert re.search(r"^refuted +sequence_kl +KL102", done.stdout, flags=re.MULTILINE)
    assert re.search(r"FAILED .*test_kl\[sequence_kl-gradient\]", done.stdout)
    assert re.search(r"FAILED .*test_kl\[sequence_kl-KL102\]", done.stdout)


def filled(text, inputs):
    return re.sub(r"\$\{\{ *inputs\.([\w-]+) *\}\}", lambda match: inputs[match[1]], text)


def wanted(step, inputs):
    """Of GitHub's expressions only the comparison that the action makes."""
    test = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) != '(\w*)' \}\}", step.get("if", ""))
    return test is None or inputs[test[1]] != test[2]


class Runner:
    """What GitHub does with the action's shell steps: inputs with their defaults, by way of the environment only."""

    def __init__(self, project, path=""):
        self.project = project
        self.files = {name: project.parent / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        self.environment = {name: str(file) for name, file in self.files.items()} | {
            "GITHUB_ACTION_PATH": "/the/action",
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(project),
            "RUNNER_TEMP": str(project.parent),
            "PATH": f"{path}{os.environ['PATH']}",
        }

    def __call__(self, **given):
        inputs = {name: entry["default"] for name, entry in ACTION["inputs"].items()} | given
        for file in self.files.values():
            file.touch()
        for step in STEPS:
            if "run" in step and wanted(step, inputs):
                assert "${{" not in step["run"], "an input that stands in a script is run as one"
                folder = self.project / filled(step.get("working-directory", "."), inputs)
                environment = {name: filled(text, inputs) for name, text in step.get("env", {}).items()}
                command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"])
                done = run(folder, *command, **environment, **self.environment)
                if done.returncode:
                    break
        return done

    def output(self):
        return self.files["GITHUB_OUTPUT"].read_text()

    def summary(self):
        return self.files["GITHUB_STEP_SUMMARY"].read_text()


@pytest.fixture
def action(project):
    return Runner(project)


def test_the_action_has_the_parts_that_github_asks_for():
    assert {"name", "description", "inputs", "outputs", "runs"} <= ACTION.keys()
    assert ACTION["runs"]["using"] == "composite"
    assert all(("run" in step) != ("uses" in step) and ("shell" in step) == ("run" in step) for step in STEPS)
    assert all(entry.keys() == {"description", "default"} for entry in ACTION["inputs"].values())
    assert set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text())) == set(ACTION["inputs"])
    steps = {step["id"] for step in STEPS if "id" in step}
    assert {re.search(r"steps\.(\w+)\.", entry["value"])[1] for entry in ACTION["outputs"].values()} <= steps


def test_the_action_grades_what_is_configured_and_writes_the_summary(project, action):
    change(project, BREAKS)
    action.files["GITHUB_STEP_SUMMARY"].write_text("### Before\n")
    done = action(install="none")
    assert done.returncode == 1, done.stdout + done.stderr
    assert action.output() == "exit-code=1\n"
    assert re.search(
        "::notice file=tiny_rl/losses.py,line=[0-9]+,title=KL201 partial-gradient::tiny_rl.losses:token_kl: expected",
        done.stdout,
    )
    assert re.search("\n::error file=tiny_rl/losses.py,line=[0-9]+,title=KL102 forward-kl-gradient::", done.stdout)
    assert action.summary().count("### ") == 3, "a summary is added to what other steps have written"
    assert "### ❌ `tiny_rl.losses:sequence_kl`: refuted" in action.summary()
    assert "### ✅ `tiny_rl.losses:token_kl`: confirmed" in action.summary()


HOSTILE = """
def raises(logp):
    raise ValueError("no\\n::error::injected\\n  ::stop-commands::quiet\\n##[error]older")
"""


def test_no_line_of_an_exception_is_a_command_and_files_are_named_from_the_root(project, action):
    """Its runner takes a line that begins with `::` after blanks, or has `##[` anywhere, for a command."""
    (project / "below").mkdir()
    (project / "below" / "hostile.py").write_text(HOSTILE)
    done = action(**{"targets": "hostile.py:raises", "working-directory": "below", "install": "none"})
    assert done.returncode == 3
    commands = [line for line in done.stdout.splitlines() if line.lstrip().startswith("::") or "##[" in line]
    assert [line.partition(",")[0] for line in commands] == ["::error file=below/hostile.py"]
    assert r"\::stop-commands::quiet" in done.stdout


@pytest.mark.scheduled
def test_the_action_takes_targets_and_options_a_line_each(action):
    done = action(
        install="none",
        targets="  tiny_rl/losses.py:sequence_kl \n\n tiny_rl.losses:token_kl\n",
        options="-v\n--environment bandit,sequence\n--expect-failure  KL201=a reason of several words \n\n--seed=3\n",
    )
    assert done.returncode == 1  # the excuse is stale for the first target
    assert "KL201 is expected to fail (a reason of several words), but it passes" in " ".join(done.stdout.split())
    assert "expected failure: KL201 partial-gradient: a reason of several words" in done.stdout
    assert "seed 3" in done.stdout
    assert "file=tiny_rl/losses.py" in done.stdout


@pytest.mark.scheduled
def test_the_action_scans_a_tree_and_leaves_a_file_for_code_scanning(project, action):
    change(project, BREAKS)
    done = action(install="none", scan="tiny_rl\n", options="--no-cache")
    assert done.returncode == 1, done.stdout + done.stderr
    path = project.parent / "kltest.sarif"
    assert action.output() == f"sarif={path}\nexit-code=1\n"
    results = json.loads(path.read_text())["runs"][0]["results"]
    assert "KL102" in {result["ruleId"] for result in results}
    (place,) = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results}
    assert f"::error file={place},line=" in done.stdout
    assert "local_forward_kl" in action.summary()


@pytest.mark.parametrize(
    ("given", "code"),
    first(
        1,
        [
            ({"fail-on-unreadable": "true"}, 4),
            ({}, 0),
            ({"options": "--no-cache\n--strict"}, 4),
        ],
    ),
)
def test_the_action_fails_on_what_it_cannot_read_only_if_asked_to(project, action, given, code):
    path = project / "tiny_rl" / "losses.py"
    path.write_text("def loss(logp, ref_logp, power):\n    return ((logp - ref_logp).abs() ** power).sum()\n")
    done = action(install="none", scan="tiny_rl", **given)
    assert done.returncode == code, done.stdout + done.stderr
    assert action.output().endswith("exit-code=4\n")
    assert "0 of 1 variants graded" in done.stdout
    hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
    passed = run(project, *re.sub(r"^kltest", "python -m kltest.cli", hook["entry"]).split(), "tiny_rl")
    assert (passed.returncode, "0 of 1 variants graded" in passed.stdout, hook["verbose"]) == (0, True, True)


@pytest.mark.parametrize(
    ("given", "code"),
    first(
        1,
        [
            ({"scan": "nowhere"}, 2),
            ({"targets": "k3-los"}, 2),
            ({"options": "reverse_kl"}, 2),
            ({"options": "--no-such-option"}, 2),
            ({"targets": "--help"}, 2),
            ({"working-directory": "tests"}, 0),
        ],
    ),
)
def test_the_actions_exit_code_is_kltests(action, given, code):
    assert action(install="none", **given).returncode == code


BAITS = ["$(touch ran)", "`touch ran`", "1; touch ran", "1); touch ran; x=(1", '"; touch ran; "', "'; touch ran; '"]


@pytest.mark.parametrize("bait", first(1, BAITS))
def test_nothing_in_an_input_is_run(project, action, bait):
    assert action(install="none", targets=bait, options=f"--seed {bait}\n--seed={bait}").returncode == 2
    assert not list(project.rglob("ran"))


@pytest.mark.parametrize(
    ("given", "installed"),
    [("", "/the/action"), ("kltest==0.1.0", "kltest==0.1.0"), ("./a b; touch ran", "./a b; touch ran")],
)
def test_the_action_installs_what_it_is_told_to(project, tmp_path, given, installed):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s|' \"$@\" >> {tmp_path}/called\n")
    python.chmod(0o755)
    assert Runner(project, f"{tmp_path}/bin:")(install=given).returncode == 0
    assert (tmp_path / "called").read_text().startswith(f"-m|pip|install|--|{installed}|-m|kltest.cli|grade|")
    assert not list(tmp_path.rglob("ran"))


BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]


def workflows():
    """The page's whole workflows: the steps of the only job of each."""
    whole = [block for block in BLOCKS if isinstance(block, dict)]
    # YAML reads the key `on` as a boolean.
    assert all(True in flow and flow["permissions"] == {"contents": "read"} for flow in whole)
    return [job["steps"] for flow in whole for job in flow["jobs"].values()]


def test_the_guide_of_the_scan_calls_the_action_and_the_hook_as_they_are():
    flow, hook, _ = SCAN_BLOCKS
    _, ours, upload = flow["jobs"]["scan"]["steps"]
    assert ours["with"].keys() <= ACTION["inputs"].keys()
    assert upload["with"] == {"sarif_file": f"${{{{ steps.{ours['id']}.outputs.sarif }}}}"}
    assert "sarif" in ACTION["outputs"]
    assert flow["permissions"]["security-events"] == "write"
    (made,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [each["id"] for each in hook["repos"][0]["hooks"]] == [made["id"]]
    assert made["entry"].split() == ["kltest", "scan", "--allow-ungraded"]
    assert not made["pass_filenames"]


@pytest.mark.scheduled
def test_the_workflow_without_the_action_annotates_and_writes_the_summary(project, tmp_path):
    *_, flow = SCAN_BLOCKS
    (steps,) = [job["steps"] for job in flow["jobs"].values()]
    change(project, BREAKS)
    assert walked(steps, project, tmp_path, lambda given: None) == [1]
    assert "KL term" in (tmp_path / "summary").read_text()


def test_the_page_calls_the_action_as_it_is():
    steps = [step for block in BLOCKS if isinstance(block, list) for step in block]
    ours = [step for step in steps if "kltest" in step.get("uses", "")]
    assert ours
    for step in ours:
        assert step.get("with", {}).keys() <= ACTION["inputs"].keys()


def walked(steps, project, tmp_path, checkout):
    """The steps' exit codes, by hand: `checkout` stands for GitHub's own, and pip is not called."""
    (tmp_path / "temp").mkdir()
    codes = []
    for step in steps:
        if "actions/checkout" in step.get("uses", ""):
            checkout(step.get("with", {}))
        if "run" not in step or "pip install" in step["run"]:
            continue
        done = run(
            project,
            *("bash", "--noprofile", "--norc", "-e", "-c", step["run"]),
            RUNNER_TEMP=str(tmp_path / "temp"),
            GITHUB_ACTIONS="true",
            GITHUB_WORKSPACE=str(project),
            GITHUB_STEP_SUMMARY=str(tmp_path / "summary"),
        )
        codes.append(done.returncode)
        assert "Traceback" not in done.stdout + done.stderr
        if done.returncode and not step.get("continue-on-error"):
            break
    return codes


@pytest.mark.scheduled
def test_the_pages_workflow_holds_the_line_and_writes_the_summary(project, tmp_path):
    steps, _ = workflows()
    assert walked(steps, project, tmp_path, lambda given: None) == [0]
    summary = (tmp_path / "summary").read_text()
    assert summary.count("confirmed") >= 2


@pytest.mark.scheduled
@pytest.mark.parametrize("adopting", first(1, [False, True]), ids=["graded before", "the pull request that begins it"])
def test_the_pages_workflow_says_what_a_pull_request_changes(project, tmp_path, adopting):
    _, steps = workflows()
    settings = (project / "pyproject.toml").read_text()
    losses = project / "tiny_rl" / "losses.py"

    def checkout(given):
        if "ref" in given:
            (project / "pyproject.toml").write_text("" if adopting else settings)
        else:
            (project / "pyproject.toml").write_text(settings)
            losses.write_text(losses.read_text().replace("/ 2", "/ -2"))

    assert walked(steps, project, tmp_path, checkout) == [5 if adopting else 0, 1]
    summary = (tmp_path / "summary").read_text()
    assert ("### Changes since" in summary) == (not adopting)
    assert ("| verdict | confirmed | refuted |" in summary) == (not adopting)


@pytest.mark.scheduled
def test_the_pages_commands_run(project):
    """Every `kltest …` of the page's shell blocks, in the example project; each says how it ends."""
    commands = re.findall(r"^(kltest grade.*?)(?: +# exit (\d))?$", PAGE, flags=re.MULTILINE)
    assert len(commands) >= 3
    for command, code in commands:
        script = re.sub(r"^kltest", "python -m kltest.cli", command)
        done = run(project, "bash", "-c", script)
        assert done.returncode == int(code or 0), (command, done.stdout, done.stderr)
