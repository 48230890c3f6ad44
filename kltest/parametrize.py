"""`@kltest.parametrize_with_checks`: a pytest item for each loss and check; nothing is graded at collection.

A loss is graded in this process when the first of its items runs, once for all of them.
"""

import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

import pytest

from kltest.errors import KltestWarning, TargetError, UsageError, did_you_mean
from kltest.grading import forms
from kltest.grading.options import OPTIONS, RENAMED, Options, renamed
from kltest.grading.verdict import selected_codes
from kltest.report import CheckResult, RefutedError, Report

Target = Callable[..., Any] | str
Reasons = Mapping[str, str]
GRADIENT = "gradient"

# The options of `kltest.grade` that may be given.
ALLOWED = {*OPTIONS, *RENAMED} - {"name", "expected_failures"}
# Longest list among a partial's arguments that is written out in an id.
ENTRIES_NAMED = 4


def parametrize_with_checks(
    losses: Iterable[Target],
    *,
    expected_failed_checks: Reasons | Callable[[Any], Reasons | None] | None = None,
    **options: Any,
) -> pytest.MarkDecorator:
    """Parametrize a test function over losses and checks; its parameters are `loss` and `check`.

        @kltest.parametrize_with_checks([my_loss, "k3-loss"], expected_failed_checks={"KL201": "on purpose"})
        def test_kl(loss, check):
            check(loss)

    Besides the checks there is an item for the gradient itself. Ids are `my_loss-gradient`, `my_loss-KL101`, ….
    Checks that only warn give a KltestWarning and pass.

    Args:
        losses: Callables, texts that `kltest.grade` takes, or a `pytest.param` of one of these.
        expected_failed_checks: Reasons by code, for all losses or, as a function of a loss, for each. A check that is
            expected to fail and passes is a failure, unless `allow_unexpected_passes=True`. An entry for a check that
            no loss has here gives a KltestWarning.
        **options: Options of `kltest.grade`.

    Returns:
        A decorator.

    Raises:
        UsageError: A loss, a code or an option is wrong.
    """
    for name in options.keys() - ALLOWED:
        near = "give them as expected_failed_checks; " if name == "expected_failures" else did_you_mean(name, ALLOWED)
        known = ", ".join(sorted(ALLOWED - RENAMED.keys()))
        raise UsageError(f"parametrize_with_checks: {name} is no option of kltest.grade; {near}there are: {known}")
    options = renamed(options, stacklevel=3)
    if isinstance(losses, str) or not isinstance(losses, Iterable):
        raise UsageError(f"parametrize_with_checks: give a list of losses; it is {losses!r}")
    entries = [_entry(loss) for loss in losses]
    if not entries:
        raise UsageError("parametrize_with_checks: the list of losses is empty")
    parameters: list[Any] = []
    names: list[str] = []
    expected: set[str] = set()
    made: set[str] = set()
    for loss, label, marks in entries:
        numbered = (f"{label}-{number}" for number in count(2))
        names.append(next(name for name in chain([label], numbered) if name not in names))
        given = expected_failed_checks(loss) if callable(expected_failed_checks) else expected_failed_checks
        reasons = forms.expected_failures({} if given is None else given, "expected_failed_checks")
        expected |= reasons.keys()
        for check in graded_checks(loss, names[-1], {**options, "expected_failures": reasons}):
            made.add(check.code)
            parameters.append(pytest.param(loss, check, id=f"{names[-1]}-{check.code}", marks=marks))
    for code in sorted(expected - made):
        words = f"{code} is expected to fail, but no loss has that check here: it was not selected"
        warnings.warn(f"expected_failed_checks: {words}", KltestWarning, stacklevel=2)
    return pytest.mark.parametrize(("loss", "check"), parameters)


def _entry(given: Any) -> tuple[Target, str, Any]:
    """A loss with its name, and the marks of a `pytest.param`."""
    wrapped = hasattr(given, "values") and hasattr(given, "marks") and hasattr(given, "id")
    values = given.values if wrapped else (given,)
    loss = values[0] if len(values) == 1 else None
    if not (callable(loss) or (isinstance(loss, str) and loss.strip())):
        raise UsageError(
            "parametrize_with_checks: one loss is a callable, a registered name, package.module:function or "
            f"path/to/file.py:function; one is {given!r}"
        )
    return loss, (wrapped and given.id) or loss_name(loss), given.marks if wrapped else ()


def loss_name(loss: Target) -> str:
    """Return the name of a loss in an id: without its module, and for a partial with its arguments."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, partial):
        given = [*map(_argument, loss.args), *(f"{name}={_argument(value)}" for name, value in loss.keywords.items())]
        return f"{loss_name(loss.func)}({', '.join(given)})"
    names = (getattr(loss, attribute, None) for attribute in ("__qualname__", "name"))
    name = next((name for name in names if isinstance(name, str) and name), type(loss).__qualname__)
    return re.sub(r"^.*<locals>\.", "", name).strip("<>")


def _argument(value: object) -> str:
    """A text that is the same in every process: for most objects their type, since their own text holds an address."""
    if value is None or isinstance(value, bool | int | float | str):
        return reprlib.repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]" if len(value) <= ENTRIES_NAMED else type(value).__name__
    return loss_name(value) if callable(value) else type(value).__name__


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
    codes = selected_codes(selected.select, selected.ignore, selected.part)
    grading = GradedOnce(loss, name, options)
    return [GradedCheck(code, grading) for code in (GRADIENT, *codes)]


def assert_gradient(report: Report) -> None:
    """Raise RefutedError with the report if a row disagrees; xfail if only expected failures account for that."""
    __tracebackhide__ = True
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
