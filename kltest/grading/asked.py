"""What `kltest.grade` is asked, checked before anything is run, by the rules that hold on the command line too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kltest.errors import UsageError
from kltest.grading.expected_failures import checked as reasons
from kltest.grading.options import GRADE
from kltest.truth import parse
from kltest.truth.combination import canonical

OPTIONAL = frozenset(("placement", "credit", "sampler", "timeout", "group_size", "batch_size", "samples", "bound"))
"""What may be None, and then is as if it had not been given."""
CODES = frozenset(("select", "ignore"))
"""What may be None or empty, and then narrows nothing."""


def asked(
    *,
    expect: str | Mapping[str, float],
    arguments: Mapping[str, Any] | None,
    beta: float | None,
    expected_failures: Mapping[str, str] | None,
    name: str | None,
    **options: Any,
) -> dict[str, Any]:
    """All arguments of `kltest.grade` but the loss in their checked form; UsageError for the first that is wrong."""
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise UsageError(f"name: give a text to call the loss by; it is {name!r}")
    if beta is not None and not (_is_number(beta) and 0 < abs(beta) < math.inf):
        raise UsageError(
            f"beta must be a finite number other than 0, not {beta!r}: the KL part is what changes with it"
        )
    checked = {
        "expect": _combination(expect),
        "arguments": {} if arguments is None else GRADE["arg"](arguments, "arguments"),
        "expected_failures": reasons({} if expected_failures is None else expected_failures),
        "beta": beta,
        "name": name,
    }
    for option, given in options.items():
        value = _listed(given) if option in CODES | {"environment"} else given
        left_out = (option in OPTIONAL and value is None) or (option in CODES and value in (None, "", []))
        checked[option] = None if left_out else GRADE[option.replace("_", "-")](value, option)
    return checked


def _combination(given: object) -> dict[str, float]:
    if not isinstance(given, Mapping):
        return parse(GRADE["expect"](given, "expect"))
    if not all(isinstance(name, str) and _is_number(coefficient) for name, coefficient in given.items()):
        raise UsageError(f'expect: give numbers by the names of gradients, as {{"reverse_kl": 1.0}}; it is {given!r}')
    try:
        return canonical(given)
    except UsageError as error:
        raise UsageError(f"expect: {error}") from None


def _listed(given: object) -> object:
    return given if isinstance(given, str) or not isinstance(given, Iterable) else list(given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
