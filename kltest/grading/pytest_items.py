"""Items of pytest: a loss is graded in this process when the first of its items runs, once for all of them."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kltest.errors import KltestWarning, TargetError, UsageError
from kltest.grading.options import Options
from kltest.grading.verdict import selected_codes
from kltest.report import CheckResult, RefutedError, Report

Target = Callable[..., Any] | str

GRADIENT = "gradient"


class GradedOnce:
    """A loss with its options, graded when its report is first read; so is another loss with the same options."""

    def __init__(self, loss: Target, name: str, options: Mapping[str, Any]) -> None:
        self.loss, self.name, self.options = loss, name, options
        # By the id of a loss, which is stored so that its id stays its own.
        self._reports: dict[int, tuple[Target, Report]] = {}

    @property
    def known(self) -> Report | None:
        """The report of its own loss, None if that is not graded."""
        return self._reports.get(id(self.loss), (None, None))[1]

    def report(self, loss: Target) -> Report:
        """Return the report of a loss. Raises UsageError for a loss that cannot be called."""
        __tracebackhide__ = True
        from kltest.grading.grader import grade

        if id(loss) not in self._reports:
            try:
                self._reports[id(loss)] = loss, grade(loss, name=self.name, **self.options)
            except UsageError as error:
                raise UsageError(str(error)) from None  # without the frames of kltest
        return self._reports[id(loss)][1]


class GradedCheck:
    """One check of one loss, called by a test with that loss."""

    def __init__(self, code: str, grading: GradedOnce) -> None:
        self.code, self.grading = code, grading

    def __repr__(self) -> str:
        return f"<check {self.code} of {self.grading.name}>"

    def __call__(self, loss: Target) -> None:
        """Raise RefutedError if the check failed and TargetError if the loss failed; else skip, warn, or return."""
        __tracebackhide__ = True
        report = self.grading.report(loss)
        if report.verdict == "error":
            raise TargetError(report.error)
        if self.code == GRADIENT:
            assert_gradient(report)
        else:
            found = next(check for check in report.checks if check.code == self.code)
            assert_check(report, found, self.grading.options.get("expected_failures", {}).get(self.code, ""))


def graded_checks(loss: Target, name: str, options: Mapping[str, Any]) -> list[GradedCheck]:
    """Return the gradient and every selected check of one grading. Raises UsageError for a wrong option."""
    selected = Options.of(**options)
    codes = selected_codes(selected.select, selected.ignore)
    grading = GradedOnce(loss, name, options)
    return [GradedCheck(code, grading) for code in (GRADIENT, *codes)]


def assert_gradient(report: Report) -> None:
    """Raise RefutedError with the report if a row disagrees; xfail if only expected failures account for that."""
    __tracebackhide__ = True
    import pytest

    wrong = not report.gradients or any(row.refutes or row.agrees is None for row in report.gradients)
    codes = {code for row in report.gradients for code in row.excused}
    if codes and not wrong:
        reasons = (f"{check.code}: {check.excused}" for check in report.expected_failures if check.code in codes)
        pytest.xfail(" ".join(reasons))  # returns under --runxfail
    if codes or wrong:
        raise RefutedError(report.to_text())


def assert_check(report: Report, check: CheckResult, expected: str = "") -> None:
    """Raise RefutedError, xfail, skip or warn if the check did not pass; `expected` is why it is expected to fail."""
    __tracebackhide__ = True
    import pytest

    words = f"{report.target}: {check.words}"
    if check.status == "fail" and check.excused:
        pytest.xfail(check.excused)
        check = replace(check, excused="")  # xfail returns under --runxfail
    if check.refutes:
        raise RefutedError(words)
    if check.status == "fail":
        warnings.warn(words, KltestWarning, stacklevel=3)
    elif check.status != "pass":
        if expected:
            words = f"{check.code} is expected to fail for {report.target}, but the check could not be made here: "
            warnings.warn(words + check.message, KltestWarning, stacklevel=3)
        pytest.skip(check.message or "no reason given")
