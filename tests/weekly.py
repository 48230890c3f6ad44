"""Which rows of a table run at every push: its first ones, or some that are spread over it. All others run weekly.

Of random examples an eighth is tried at every push, all of them weekly.

A table that is cut at its first rows opens with a row of each mechanism; those after them repeat one with another
number, form or name. Tables of names, whose order says nothing, are cut by `spread`.
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get("KLTEST_EXAMPLES") == "all"


def examples(count: int) -> int:
    """Return how many random examples of `count` are tried."""
    return count if ALL else count // 8


def later(row: Any) -> Any:
    """Mark a row of `parametrize` as scheduled: a value, a tuple of values, or a `pytest.param`."""
    values = row.values if hasattr(row, "marks") else row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, id=getattr(row, "id", None), marks=pytest.mark.scheduled)


def first(count: int, rows: Iterable[Any]) -> list[Any]:
    """Return rows for `parametrize`: the first `count` for every push, the others scheduled."""
    rows = list(rows)
    return [*rows[:count], *map(later, rows[count:])]


def spread(count: int, rows: Iterable[Any]) -> list[Any]:
    """Return rows for `parametrize`: about `count`, spread evenly, for every push, the others scheduled."""
    rows = list(rows)
    step = max(len(rows) // count, 1)
    return [row if at % step == 0 else later(row) for at, row in enumerate(rows)]
