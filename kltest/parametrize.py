"""`@kltest.parametrize_with_checks`: a pytest item for each loss and check; nothing is graded at collection."""

import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from kltest.errors import KltestWarning, UsageError, did_you_mean
from kltest.grading import forms
from kltest.grading.options import OPTIONS, RENAMED, renamed
from kltest.grading.pytest_items import Target, graded_checks

if TYPE_CHECKING:
    import pytest

Reasons = Mapping[str, str]

# The options of `kltest.grade` that may be given.
TAKEN = {*OPTIONS, *RENAMED} - {"name", "expected_failures"}
# Longest list among a partial's arguments that is written out in an id.
ENTRIES_NAMED = 4


def parametrize_with_checks(
    losses: Iterable[Target],
    *,
    expected_failed_checks: Reasons | Callable[[Any], Reasons | None] | None = None,
    **options: Any,
) -> "pytest.MarkDecorator":
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
    import pytest

    for name in options.keys() - TAKEN:
        near = "give them as expected_failed_checks; " if name == "expected_failures" else did_you_mean(name, TAKEN)
        known = ", ".join(sorted(TAKEN - RENAMED.keys()))
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
