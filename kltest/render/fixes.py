"""Fixes of a report as text: what changes, the diff as it is, and what else would do."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kltest.render.tables import PLAIN, Terminal, paint, wrap
from kltest.report import Fix


class Fixed(Protocol):
    """A report, or a row of a scan, for which fixes were looked for."""

    @property
    def fixes(self) -> Sequence[Fix]:
        """The fixes, the smallest first."""

    @property
    def advice(self) -> str:
        """Why there is none."""


COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def lines(report: Fixed, terminal: Terminal = PLAIN) -> Iterator[str]:
    """Yield the first fix with its diff and the other one in a sentence, or why there is none."""
    if report.advice:
        yield from wrap(f"fix: {report.advice}", terminal, indent="  ", first="")
    for number, fix in enumerate(report.fixes):
        yield from wrap(("or: " if number else "fix: ") + summary(fix), terminal, indent="  ", first="")
        if number and not terminal.verbose:
            continue
        for line in fix.diff.rstrip("\n").split("\n"):
            marked = line[:3] not in ("+++", "---") and line[:1] in COLOURS
            yield paint(line, COLOURS[line[0]], terminal) if marked else line


def summary(fix: Fix) -> str:
    """Return in a sentence what a fix does, and its price."""
    needs = "; it needs whole next-token distributions" if fix.needs_logits else ""
    variance = "" if fix.variance is None else f"; variance {fix.variance:.3g} on short rollouts"
    return f"{fix.words}; {fix.value}. Confirmed when graded again{variance}{needs}"
