"""What a check is: words for people, a predicate or an experiment, and a demonstration that can be run."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kltest.counterexample.demonstration import Demonstration
    from kltest.identify.findings import Findings, Row


@dataclass(frozen=True)
class Found:
    """What an experiment found wrong, or of a pass what it measured, or why it could not be made: whole sentences."""

    message: str
    status: Literal["pass", "fail", "skip", "inconclusive"] = "fail"


def never_moot(findings: Findings) -> str | None:
    """No declared target makes the check pointless."""
    return None


def explains_nothing(row: Row, findings: Findings) -> bool:
    """The check looks at something else than the expected gradient."""
    return False


def adds_nothing(row: Row, findings: Findings) -> str:
    """There is no more to say of a row than what was identified."""
    return ""


def finds_nothing(findings: Findings) -> Found | None:
    """The check makes no experiment of its own."""
    return None


@dataclass(frozen=True)
class Check:
    """One pitfall. `code` and `name` are stable; the texts are whole sentences, `example` has exact numbers.

    `wrong` is a loss that falls into it and `mended` the same loss put right, graded with `options`: their source is
    shown to people, so it is written as a library would. `demonstrate` runs the pitfall in the smallest world that
    shows it; the numbers of `example` are among those that it prints.

    A check speaks in one of two ways. `explains(row, findings)`: this pitfall accounts for the disagreement of that
    row, and `tells(row, findings)` says in a few words how, where the identified gradient does not.
    `examine(findings)`: an experiment of its own and what it found, None where nothing is wrong; a KltestError on the
    way makes the check inconclusive. `moot(findings)`: why the check has nothing to say here (then it is skipped with
    that reason), or None.
    """

    code: str
    name: str
    title: str
    what: str
    why: str
    example: str
    fix: str
    sources: tuple[str, ...]
    wrong: Callable[..., Any] = field(repr=False)
    mended: Callable[..., Any] = field(repr=False)
    demonstrate: Callable[[], Demonstration] = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    explains: Callable[[Row, Findings], bool] = field(default=explains_nothing, repr=False)
    tells: Callable[[Row, Findings], str] = field(default=adds_nothing, repr=False)
    examine: Callable[[Findings], Found | None] = field(default=finds_nothing, repr=False)
    moot: Callable[[Findings], str | None] = field(default=never_moot, repr=False)

    @property
    def wrong_code(self) -> str:
        """The lines of the loss that falls into the pitfall."""
        return source(self.wrong)

    @property
    def mended_code(self) -> str:
        """The corrected lines."""
        return source(self.mended)

    @property
    def remedy(self) -> str:
        """What to change, in words and then, after an empty line, in code."""
        return f"{self.fix}\n\n{self.mended_code}"


def source(function: Callable[..., Any]) -> str:
    """A function's lines as they stand in its file."""
    return textwrap.dedent(inspect.getsource(function)).strip()
