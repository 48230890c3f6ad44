"""`[tool.kltest]`: defaults and targets from the nearest pyproject.toml, and clear words about a wrong one."""

import json

import pytest
from doors import GRADED, call, canned, graded

from kltest.grading.configuration import nearest

LOSSES = """
def truth(logp, ref_logp, scale=1.0):
    return scale * 0.5 * (logp - ref_logp).sum(-1) ** 2

def token_level(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the losses above, in which kltest is called; the text given becomes its configuration."""
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def write(text):
        (tmp_path / "pyproject.toml").write_text(text)
        return tmp_path

    return write


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
    found = json.loads(call("grade", code=1).stdout)
    assert [report["verdict"] for report in found] == ["confirmed", "confirmed", "refuted"]
    assert [report["seed"] for report in found] == [5, 6, 5]
    assert [row["environment"] for report in found for row in report["gradients"]] == ["bandit"] * 3
    assert found[2]["gradients"][0]["identified"]["reverse_kl"] == pytest.approx(3, rel=1e-9)


@pytest.mark.scheduled
def test_the_command_line_wins_and_its_targets_replace_the_configured(project):
    project('[tool.kltest]\nenvironment = "mdp"\nseed = 5\nquiet = true\ntargets = ["no-such-name"]\n')
    given = ("losses.py:truth", "--environment", "bandit")
    assert call("grade", *given).stdout == "CONFIRMED  losses.py:truth: follows ∇KL(π‖ref), as declared\n"
    assert "environment  sampler" in call("grade", *given, "--verbose").stdout
    found = graded(*given, code=0)
    assert (found["seed"], [row["environment"] for row in found["gradients"]]) == (5, ["bandit"])
    assert graded(*given, "--seed", "0")["seed"] == 0


def test_the_nearest_file_is_found_from_below_and_paths_are_relative_to_it(project, monkeypatch):
    folder = project('[tool.kltest]\nenvironment="bandit"\noutput="json:out.json"\ntargets=["losses.py:truth"]\n')
    (folder / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(folder / "deep" / "er")
    call("grade", code=0)
    assert json.loads((folder / "out.json").read_text())["target"] == str(folder / "losses.py:truth")


@pytest.mark.scheduled
def test_expected_failures_for_all_and_for_one_and_of_the_command_line_add_up_by_code(project):
    project(
        """
        [tool.kltest]
        environment = "bandit,sequence"
        targets = [
            {target = "losses.py:token_level", expected-failures = {KL201 = "its own"}},
            {target = "losses.py:truth", expected_failures = {KL202 = "stale"}},
        ]
        allow-unexpected-passes = true

        [tool.kltest.expected-failures]
        KL201 = "for all"
        kl104 = "for all"
        """
    )
    for given, reason in (((), "its own"), (("--expect-failure", "KL201=a=b"), "a=b")):
        first, second = graded(*given, "--select", "KL104,KL2", code=0)
        assert {check["excused"] for check in first["checks"] if check["status"] == "fail"} == {reason}
        assert any("KL104 is expected to fail" in note for note in first["notes"])
        assert any(f"KL201 is expected to fail ({'a=b' if given else 'for all'})" in note for note in second["notes"])
        assert any("KL202 is expected to fail (stale)" in note for note in second["notes"])


@pytest.mark.parametrize(
    "text", ["", "[project]\nname='x'\n", "[tool.kltest]\nseed = 1\n", "[tool.kltest]\ntargets=[]"]
)
def test_without_targets_there_is_nothing_to_grade(project, text):
    project(text)
    assert "pyproject.toml" in call("grade", code=5).stderr


def test_other_tools_settings_are_left_alone(project):
    assert dict(nearest(project("[tool.ruff]\nline-length = 3\n")).options) == {}


NO_EFFECT = "cache is deprecated and has no effect"
RENAMED = "allow-stale-excuses is deprecated; write "


@pytest.mark.parametrize(
    ("option", "key", "says"),
    [
        ("--quiet", "", None),
        ("--cache", "", f"--{NO_EFFECT}"),
        ("--no-cache", "", f"--no-{NO_EFFECT}"),
        ("--quiet", "cache = true", f"line 2: {NO_EFFECT}"),
        ("--allow-stale-excuses", "", f"--{RENAMED}--allow-unexpected-passes"),
        ("--quiet", "allow_stale_excuses = true", f"line 2: {RENAMED}allow-unexpected-passes"),
    ],
)
def test_an_old_spelling_is_read_for_one_release_and_says_so_once(option, key, says, project, monkeypatch):
    seen = []
    monkeypatch.setattr(GRADED, lambda jobs, *others: seen.extend(job.given for job in jobs) or canned()(jobs))
    project(f"[tool.kltest]\n{key}\n")
    lines = call("grade", "t", option, code=0).stderr.splitlines()
    assert len(lines) == bool(says)
    assert says is None or says in lines[0]
    assert seen == [{"allow_unexpected_passes": True} if "stale" in f"{option}{key}" else {}]
