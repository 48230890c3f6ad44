"""What a check is: words for people, and two predicates over what grading found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kltest.grading.findings import Findings, Row


def never_moot(findings: Findings) -> str | None:
    """No declared target makes the check pointless."""
    return None


@dataclass(frozen=True)
class Check:
    """One pitfall. `code` and `name` are stable; the texts are whole sentences, `example` has exact numbers.

    `explains(row, findings)`: this pitfall accounts for the disagreement of that row. `moot(findings)`: why the check
    has nothing to say here (then it is skipped with that reason), or None.
    """

    code: str
    name: str
    title: str
    what: str
    why: str
    example: str
    fix: str
    sources: tuple[str, ...]
    explains: Callable[[Row, Findings], bool] = field(repr=False)
    moot: Callable[[Findings], str | None] = field(default=never_moot, repr=False)
