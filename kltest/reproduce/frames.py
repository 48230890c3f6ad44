"""Results as data frames: a row a record, a column a setting or a measurement.

A whole experiment's frame keeps values as they were computed (None is a value, an absent column is NaN). `select` and
`need` cut out the rows of a part and give their columns the plain types of numpy.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from kltest.errors import UsageError

Row = dict[str, Any]
Rows = pd.DataFrame | Sequence[Mapping[str, Any]]
Known = TypeVar("Known", pd.DataFrame, pd.Series)


class Missing(Exception):
    """The rows that are asked for are not among the results."""


def results(name: str, folder: Path | str = "results", **wanted: Any) -> pd.DataFrame:
    """Return the results of an experiment as a data frame.

    Args:
        name: the experiment, as `kltest run` calls it ("atlas").
        folder: where `kltest reproduce` or `kltest run` wrote them.
        **wanted: values of columns, as in `select`. Experiments of several parts have a column `part`, and other
            columns in each part: `results("metrics", part="logged")` has those of one part alone, in their own types.

    Returns:
        A row for each record; what was measured and in which unit stands in experiments/NAME/README.md.

    Raises:
        UsageError: there are no results of that name in the folder.
    """
    path = Path(folder) / name / f"{name.partition('@')[0]}.json"
    if not path.is_file():
        known = sorted(one.parent.name for one in Path(folder).glob("*/numbers.json"))
        raise UsageError(
            f"there are no results of {name!r} in {folder}; there are: {', '.join(known) or 'none'}. "
            f"`kltest run {name}` makes them"
        )
    return select(json.loads(path.read_text(encoding="utf-8")), **wanted)


def frame(rows: Rows) -> pd.DataFrame:
    """Return rows as a frame of objects: every value as it is, NaN for what a row does not have."""
    return rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows), dtype=object)


def ordered(parts: Iterable[str]) -> Callable[[Rows], pd.DataFrame]:
    """Return a function that makes rows a frame, part by part, within a part as they were computed."""
    place = list(parts).index
    return lambda rows: frame(sorted(records(rows), key=lambda row: place(row["part"])))


def records(rows: Rows) -> list[Row]:
    """Return a frame as plain dictionaries, without the columns that a row does not have."""
    if not isinstance(rows, pd.DataFrame):
        return list(rows)  # type: ignore[arg-type]
    columns = list(rows.columns)
    return [
        {
            name: value.item() if hasattr(value, "item") else value
            for name, value in zip(columns, row, strict=True)
            if not (isinstance(value, float) and value != value)
        }
        for row in zip(*(rows[name].tolist() for name in columns), strict=True)
    ]


def select(rows: Rows, part: str | None = None, **wanted: Any) -> pd.DataFrame:
    """Return the rows of a part in which columns are as wanted; perhaps none.

    Wanted is a value, one of a tuple of values, or what a function of the column says: `beta=lambda beta: beta <= 3`.
    """
    found, tests = frame(rows), {name: wanted.pop(name) for name in list(wanted) if callable(wanted[name])}
    for name, value in (wanted if part is None else {"part": part, **wanted}).items():
        if name not in found:
            return found.iloc[:0]
        column = found[name]
        found = found[column.isin(value) if isinstance(value, tuple | list | set) else column == value]
    found = found.infer_objects()
    for name, holds in tests.items():
        found = found[holds(found[name])] if len(found) else found
    return found


def need(rows: Rows, part: str | None = None, **wanted: Any) -> pd.DataFrame:
    """Return what `select` returns; raise Missing if there is none."""
    return known(select(rows, part, **wanted))


def known(rows: Known) -> Known:
    """Return the rows or values; raise Missing if there are none."""
    require(not rows.empty)
    return rows


def require(there: Any) -> None:
    """Raise Missing unless what a claim needs is there."""
    if not there:
        raise Missing


def mean(values: Iterable[float]) -> float:
    """Return the mean of what is known, added in order; Missing if nothing is."""
    found = [value for value in values if value is not None and value == value]
    require(found)
    return float(sum(found) / len(found))
