"""Questions to the rows of an experiment, and the rows of the summary that their answers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kltest.reproduce import Claim

Row = dict[str, Any]
Answer = tuple[str, bool] | None


@dataclass(frozen=True)
class Question:
    """`judge(rows)` says what was found and whether that is as claimed; None where the rows it needs are not there."""

    claim: str
    source: str
    expected: str
    judge: Callable[[Sequence[Row]], Answer]
    tolerance: str


def answers(experiment: str, questions: Sequence[Question], rows: Sequence[Row]) -> list[Claim]:
    """A claim for each question."""
    found = []
    for one in questions:
        said, agrees = one.judge(rows) or ("not run", None)
        found.append(
            Claim(
                experiment, one.claim, one.source, one.expected, said, None if agrees is None else bool(agrees),
                one.tolerance,
            )
        )  # fmt: skip
    return found


def select(rows: Sequence[Row], part: str, **wanted: Any) -> list[Row]:
    """The rows of a part in which the named columns have these values."""
    return [row for row in rows if row["part"] == part and all(row.get(name) == it for name, it in wanted.items())]


def at_most(rows: Sequence[Row], column: str, limit: float) -> Answer:
    """Whether the largest value of a column stays below a limit."""
    known = [row[column] for row in rows if row.get(column) is not None]
    return (f"at most {max(known):.1e}, of {len(known)}", max(known) < limit) if known else None
