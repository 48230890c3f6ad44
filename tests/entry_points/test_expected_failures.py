"""Expected failures: what they account for does not refute, nothing else is excused, and a stale one refutes."""

import json

import pytest
from typer.testing import CliRunner

import kltest
from kltest.cli import app
from kltest.grading.verdict import ExpectedFailures
from kltest.report import CheckResult

WHY = "token-level on purpose"


def right(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2


def token_level(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).square() / 2


def twice_token_level(logp, ref_logp, mask):
    """Wrong in two ways at once: token by token, and by a constant on a bandit."""
    return (logp - ref_logp).where(mask != 0, 0.0).square()


def grade(loss, excuses, **options):
    return kltest.grade(loss, expected_failures=excuses, select="KL1,KL2", **options)


def status(report, code):
    return next((check.status, check.excused) for check in report.checks if check.code == code)


def test_without_an_excuse_it_is_refuted_and_with_one_confirmed_and_still_shown():
    assert grade(token_level, {}).verdict == "refuted"
    report = grade(token_level, {"KL201": WHY})
    assert report.verdict == "confirmed"
    assert report.exit_code == 0
    assert status(report, "KL201") == ("fail", WHY)
    assert report.failed == []
    assert [check.code for check in report.expected_failures] == ["KL201"]
    rows = {row.environment: (row.agrees, row.excused) for row in report.gradients}
    assert rows == {"bandit": (True, ()), "sequence": (False, ("KL201",)), "ragged": (False, ("KL201",))}
    report.raise_for_failure()


def test_codes_may_be_written_small():
    assert grade(token_level, {"kl201": WHY}).verdict == "confirmed"


def test_an_excuse_covers_its_own_check_and_no_other():
    codes = {check.code for check in grade(twice_token_level, {}).failed}
    assert "KL106" in codes
    for code in codes:
        report = grade(twice_token_level, {code: "only this"})
        assert report.verdict == ("confirmed" if code == "KL201" else "refuted")  # a constant factor only warns
        assert status(report, code) == ("fail", "only this")
        assert {check.code for check in report.failed} == codes - {code}
    assert grade(twice_token_level, dict.fromkeys(codes, "both")).verdict == "confirmed"


def test_a_row_that_another_check_explains_too_still_refutes(monkeypatch):
    """A second check that accounts for the same rows is not excused with the first."""
    from kltest.checks.sequences import kl202_last_token_only

    monkeypatch.setattr(kl202_last_token_only, "explains", lambda row, findings: row.wrong)
    report = grade(token_level, {"KL201": WHY})
    assert report.verdict == "refuted"
    assert [row.excused for row in report.gradients] == [(), (), ()]
    report = grade(token_level, {"KL201": WHY, "KL202": WHY})
    assert report.verdict == "confirmed"
    assert report.gradients[1].excused == ("KL201", "KL202")


def test_an_excuse_whose_check_passes_is_stale_and_refutes():
    report = grade(right, {"KL201": WHY})
    assert report.verdict == "refuted"
    assert status(report, "KL201") == ("pass", WHY)
    with pytest.raises(AssertionError, match=r"KL201 is expected to fail .* but it passes"):
        report.raise_for_failure()


def test_a_stale_excuse_may_be_allowed_and_is_then_noted():
    report = grade(right, {"KL201": WHY}, allow_unexpected_passes=True)
    assert report.verdict == "confirmed"
    assert status(report, "KL201") == ("pass", "")
    assert any("KL201 is expected to fail" in note for note in report.notes)


def test_an_excuse_for_a_check_that_could_not_be_made_is_noted_only():
    report = grade(right, {"KL104": WHY})
    assert report.verdict == "confirmed"
    assert any("KL104 is expected to fail, but the check could not be made here" in note for note in report.notes)


def test_an_excuse_holds_for_rows_also_where_its_check_was_not_selected():
    report = kltest.grade(token_level, expected_failures={"KL201": WHY}, select="KL1")
    assert report.verdict == "confirmed"
    report = kltest.grade(right, expected_failures={"KL201": WHY}, select="KL1")
    assert report.verdict == "confirmed"
    assert any("KL201 is expected to fail, but was not selected" in note for note in report.notes)


def test_no_excuse_covers_a_loss_that_crashes_or_cannot_be_judged():
    def broken(logp):
        raise ValueError("no")

    assert grade(broken, {"KL201": WHY}).verdict == "error"
    open_ = kltest.grade("k3-ratio", sampler="current", environment="bandit", expected_failures={"KL301": WHY})
    assert open_.verdict == kltest.grade("k3-ratio", sampler="current", environment="bandit").verdict


def test_a_warning_may_be_excused_and_its_excuse_may_be_stale():
    excuses = ExpectedFailures({"KL802": WHY})
    warned = excuses.result(CheckResult("KL802", "inefficient", "fail", "noisy", level="warning"))
    assert (warned.excused, warned.refutes) == (WHY, False)
    assert excuses.result(CheckResult("KL802", "inefficient", "pass")).refutes
    assert not excuses.result(CheckResult("KL802", "inefficient", "skip")).refutes


LOSSES = """
def right(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2

def token_level(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).square() / 2
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments):
    result = CliRunner().invoke(app, ["grade", *arguments, "--environment", "bandit,sequence"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_from_the_command_line(project):
    assert call("losses.py:token_level").exit_code == 1
    assert call("losses.py:token_level", "--expect-failure", f"KL201={WHY}=so").exit_code == 0
    result = call("losses.py:right", "--expect-failure", f"KL201={WHY}", "--output", "json")
    assert result.exit_code == 1
    excused = [check for check in json.loads(result.stdout)["checks"] if check["excused"]]
    assert [(check["code"], check["status"], check["excused"]) for check in excused] == [("KL201", "pass", WHY)]
    assert call("losses.py:right", "--expect-failure", f"KL201={WHY}", "--allow-unexpected-passes").exit_code == 0


def test_from_the_configuration_for_all_and_for_one_and_they_add_up(project):
    (project / "pyproject.toml").write_text(
        """
        [tool.kltest]
        targets = ["losses.py:token_level", {target = "losses.py:right", expected-failures = {KL201 = "stale"}}]
        expected_failures = {KL201 = "for all", kl104 = "for all"}
        allow-unexpected-passes = true
        """
    )
    result = call("--output", "json", "--expect-failure", "KL201=from the command line")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert {check["excused"] for check in first["checks"] if check["status"] == "fail"} == {"from the command line"}
    assert any("KL201 is expected to fail (from the command line)" in note for note in second["notes"])
    assert any("KL104 is expected to fail" in note for note in first["notes"])


def test_a_table_of_excuses_may_stand_alone_and_a_targets_own_reason_wins(project):
    text = '[tool.kltest]\ntargets=[{target="losses.py:token_level", expected-failures={KL201="its own"}}]\n'
    (project / "pyproject.toml").write_text(text + '[tool.kltest.expected-failures]\nKL201 = "for all"\n')
    result = call("--output", "json")
    assert result.exit_code == 0, result.output
    assert {check["excused"] for check in json.loads(result.stdout)["checks"]} == {"", "its own"}
