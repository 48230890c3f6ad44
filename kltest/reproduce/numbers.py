"""The numbers that the paper cites: a tidy table with a quantity, the columns that tell its values apart, and a value.

An analysis has `numbers = Numbers()` and a generator for each part of its results::

    @numbers.add
    def _of_length(rows):
        long = need(rows, "length", seed=0)
        yield number("longest", long["length"].max())
        yield from melted(long, ["bias", "std"], ["estimator", "kl"])

A generator whose rows are missing ends there. If all that is cited are columns as they are, or one number of a column,
one call says so. The paper looks them up by all columns: #n("atlas", "bias", estimator: "k3-loss")::

    numbers.melt("length", ["bias", "std"], ["estimator", "kl"])
    numbers.single("length", {"longest": ("length", "max")}, seed=0)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from kltest.reproduce.frames import Missing, Row, Rows, frame, need, records

Cited = Iterator[Row]
Source = Callable[[pd.DataFrame], Iterable[Row]]


@dataclass(frozen=True)
class Numbers:
    """The numbers of an experiment; called with its rows, a frame with a row for each number."""

    sources: list[Source] = field(default_factory=list)

    def add(self, source: Source) -> Source:
        """Add a function that yields numbers of the rows; a decorator."""
        self.sources.append(source)
        return source

    def melt(
        self,
        part: Any,
        quantities: Sequence[str] | Mapping[str, str],
        by: Sequence[str],
        *,
        means: bool = False,
        **wanted: Any,
    ) -> None:
        """Add columns of a part, as they are in its rows or as means over rows that are alike in `by`."""

        def source(rows: pd.DataFrame) -> Iterator[Row]:
            found = need(rows, part, **wanted)
            if means:
                return melted(found.groupby(list(by))[list(quantities)].mean(), quantities)
            return melted(found, quantities, by)

        self.add(source)

    def single(self, part: Any, quantities: Mapping[str, tuple[str, Any]], **wanted: Any) -> None:
        """Add a number for each quantity: what a function, or pandas' one of that name, makes of a column."""

        def source(rows: pd.DataFrame) -> Iterator[Row]:
            found = need(rows, part, **wanted)
            for quantity, (column, of) in quantities.items():
                yield number(quantity, of(found[column]) if callable(of) else found[column].agg(of))

        self.add(source)

    def __call__(self, rows: Rows) -> pd.DataFrame:
        whole, found = frame(rows), {}
        for source in self.sources:
            try:
                for one in source(whole):
                    found[tuple(sorted((name, value) for name, value in one.items() if name != "value"))] = one
            except Missing:
                continue
        return frame(list(found.values()))


def number(quantity: str, value: Any, **where: Any) -> Row:
    """Return a row of the table; a value that is not known is None."""
    value = value.item() if hasattr(value, "item") else value
    return {"quantity": quantity, **where, "value": None if value != value else value}


def melted(rows: pd.DataFrame, quantities: Sequence[str] | Mapping[str, str], by: Sequence[str] = ()) -> Iterator[Row]:
    """Yield a number for each row and quantity; a mapping gives columns other names.

    The columns that tell values apart are `by`; without any, the levels of the frame's index.
    """
    if not by:
        by, rows = [str(name) for name in rows.index.names], rows.reset_index()
    names = quantities if isinstance(quantities, Mapping) else {name: name for name in quantities}
    for row in records(rows):
        for column, quantity in names.items():
            if column in row:
                yield number(quantity, row[column], **{name: row[name] for name in by})


def extremes(quantity: str, values: Iterable[float], **where: Any) -> Iterator[Row]:
    """Yield the smallest and the largest of some values; nothing if there are none."""
    if found := [value for value in values if value is not None and value == value]:
        yield number(f"smallest {quantity}", min(found), **where)
        yield number(f"largest {quantity}", max(found), **where)
