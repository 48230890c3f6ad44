"""`@kltest.parametrize_with_checks`: a pytest item for each loss and check; collecting them makes names only."""

from __future__ import annotations

import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kltest.errors import KltestWarning, UsageError, did_you_mean
from kltest.grading.expected_failures import checked
from kltest.grading.options import GRADE
from kltest.grading.pytest_items import Target, graded_checks

if TYPE_CHECKING:
    import pytest

Excuses = Mapping[str, str]

# What the command line's options are called in kltest.grade, whose own module loads torch.
NAMES = {name.replace("-", "_") for name in GRADE}
OPTIONS = NAMES - {"arg", "expected_failures"} | {"arguments", "beta"}
# A list among a partial's arguments is written out in an id up to this length.
ENTRIES_NAMED = 4


def parametrize_with_checks(
    losses: Iterable[Target],
    *,
    expected_failed_checks: Excuses | Callable[[Any], Excuses | None] | None = None,
    **options: Any,
) -> pytest.MarkDecorator:
    """A decorator for a test function with the parameters `loss` and `check`: an item for each loss and each check.

        @kltest.parametrize_with_checks([my_loss, "k3-loss"], expected_failed_checks={"KL201": "on purpose"})
        def test_kl(loss, check):
            check(loss)

    Besides the checks there is an item for the gradient itself, which is always judged; ids are `my_loss-gradient`,
    `my_loss-KL101`, …. Nothing is graded when tests are collected. A loss is a callable, anything else that
    `kltest.grade` takes, or a `pytest.param` of one. `options` are those of `kltest.grade`.

    `expected_failed_checks` gives reasons by code, for all losses or, as a function of a loss, for each. It is strict:
    a check that is expected to fail and passes is a failure (unless `allow_stale_excuses=True`). An excuse for a check
    that no loss has here gives a KltestWarning. Checks that only warn (KL8xx) give a KltestWarning and pass.

    Raises UsageError for losses, codes or options that mean nothing.
    """
    import pytest

    _check_options(options)
    entries = [_Entry(loss) for loss in _listed(losses)]
    names = _distinct([entry.name for entry in entries])
    parameters: list[Any] = []
    excused: set[str] = set()
    made: set[str] = set()
    for entry, name in zip(entries, names, strict=True):
        excuses = _excuses(expected_failed_checks, entry.loss)
        excused |= excuses.keys()
        for check in graded_checks(entry.loss, name, {**options, "expected_failures": excuses}):
            made.add(check.code)
            parameters.append(pytest.param(entry.loss, check, id=f"{name}-{check.code}", marks=entry.marks))
    for code in sorted(excused - made):
        warnings.warn(
            f"expected_failed_checks: {code} is excused, but no loss has that check here: it was not selected",
            KltestWarning,
            stacklevel=2,
        )
    return pytest.mark.parametrize(("loss", "check"), parameters)


class _Entry:
    """A loss as it was given, with the id and the marks of a `pytest.param`."""

    def __init__(self, given: Any) -> None:
        wrapped = hasattr(given, "values") and hasattr(given, "marks") and hasattr(given, "id")
        if wrapped and len(given.values) != 1:
            raise UsageError(f"parametrize_with_checks: a pytest.param is to hold one loss; one holds {given.values!r}")
        self.loss = given.values[0] if wrapped else given
        self.marks = given.marks if wrapped else ()
        if not (callable(self.loss) or (isinstance(self.loss, str) and self.loss.strip())):
            raise UsageError(
                "parametrize_with_checks: a loss is a callable, a registered name, package.module:function or "
                f"path/to/file.py:function; one is {self.loss!r}"
            )
        self.name = (wrapped and given.id) or loss_name(self.loss)


def loss_name(loss: Target) -> str:
    """A loss in an id: what it is called, without where it was defined; a partial with its own arguments."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, partial):
        given = [*map(_argument, loss.args), *(f"{name}={_argument(value)}" for name, value in loss.keywords.items())]
        return f"{loss_name(loss.func)}({', '.join(given)})"
    names = (getattr(loss, attribute, None) for attribute in ("__qualname__", "name"))
    name = next((name for name in names if isinstance(name, str) and name), type(loss).__qualname__)
    return re.sub(r"^.*<locals>\.", "", name).strip("<>")


def _argument(value: object) -> str:
    """The same text in every process: of most objects only the kind, since their own text holds an address."""
    if value is None or isinstance(value, bool | int | float | str):
        return reprlib.repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]" if len(value) <= ENTRIES_NAMED else type(value).__name__
    return loss_name(value) if callable(value) else type(value).__name__


def _listed(losses: Iterable[Target]) -> Iterator[Target]:
    if isinstance(losses, str) or not isinstance(losses, Iterable):
        raise UsageError(f"parametrize_with_checks: give a list of losses; it is {losses!r}")
    found = list(losses)
    if not found:
        raise UsageError("parametrize_with_checks: the list of losses is empty")
    yield from found


def _distinct(names: list[str]) -> list[str]:
    """Losses of the same name told apart by a number, in their order."""
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        while seen[name] > 1 and f"{name}-{seen[name]}" in names:
            seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name}-{seen[name]}"
    return names


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options.keys() - OPTIONS:
        hint = "give the excuses as expected_failed_checks; " if name == "expected_failures" else ""
        hint = hint or did_you_mean(name, OPTIONS)
        raise UsageError(
            f"parametrize_with_checks: {name} is no option of kltest.grade; {hint}"
            f"there are: {', '.join(sorted(OPTIONS))}"
        )


def _excuses(given: Excuses | Callable[[Any], Excuses | None] | None, loss: Target) -> dict[str, str]:
    found = given(loss) if callable(given) else given
    return checked({} if found is None else found, "expected_failed_checks")
