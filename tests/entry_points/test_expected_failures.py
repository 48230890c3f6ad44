"""Expected failures: what they account for does not refute, nothing else is excused, and a stale one refutes."""

import pytest
from cases.parts import k2 as right
from weekly import first

import kltest
from kltest.grading.verdict import ExpectedFailures
from kltest.report import CheckResult

WHY = "token-level on purpose"


def token_level(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0).square() / 2


def twice_token_level(logp, ref_logp, mask):
    """Wrong in two ways at once: token by token, and by a constant on a bandit."""
    return (logp - ref_logp).where(mask != 0, 0.0).square()


def grade(loss, excuses, **options):
    return kltest.grade(loss, expected_failures=excuses, **{"select": "KL1,KL2", **options})


def status(report, code):
    return next((check.status, check.excused) for check in report.checks if check.code == code)


def test_an_excuse_makes_it_confirmed_and_is_still_shown():
    assert grade(token_level, {}).verdict == "refuted"
    report = grade(token_level, {"kl201": WHY})
    assert (report.verdict, report.exit_code) == ("confirmed", 0)
    assert status(report, "KL201") == ("fail", WHY)
    assert (report.failed, [check.code for check in report.expected_failures]) == ([], ["KL201"])
    rows = {row.environment: (row.agrees, row.excused) for row in report.gradients}
    assert rows == {"bandit": (True, ()), "sequence": (False, ("KL201",)), "ragged": (False, ("KL201",))}
    report.raise_for_failure()


@pytest.mark.scheduled
def test_an_excuse_covers_its_own_check_and_no_other():
    codes = {check.code for check in grade(twice_token_level, {}).failed}
    assert "KL106" in codes
    for code in codes:
        report = grade(twice_token_level, {code: "only this"})
        assert report.verdict == ("confirmed" if code == "KL201" else "refuted")  # a constant factor only warns
        assert status(report, code) == ("fail", "only this")
        assert {check.code for check in report.failed} == codes - {code}
    assert grade(twice_token_level, dict.fromkeys(codes, "both")).verdict == "confirmed"


@pytest.mark.scheduled
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
    assert (report.verdict, report.exit_code) == ("refuted", 1)
    assert status(report, "KL201") == ("pass", WHY)
    with pytest.raises(AssertionError, match=r"KL201 is expected to fail .* but it passes"):
        report.raise_for_failure()


@pytest.mark.parametrize(
    ("loss", "code", "options", "note"),
    first(
        1,
        [
            (right, "KL201", {"allow_unexpected_passes": True}, "KL201 is expected to fail (token-level on purpose)"),
            (right, "KL104", {}, "KL104 is expected to fail, but the check could not be made here"),
            (right, "KL201", {"select": "KL1"}, "KL201 is expected to fail, but was not selected"),
            (token_level, "KL201", {"select": "KL1"}, ""),  # it holds for rows all the same
        ],
    ),
)
def test_an_excuse_that_changes_nothing_is_noted_only(loss, code, options, note):
    report = grade(loss, {code: WHY}, **options)
    assert report.verdict == "confirmed"
    assert not any(check.excused for check in report.checks)
    assert not note or any(note in each for each in report.notes)


@pytest.mark.scheduled
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
