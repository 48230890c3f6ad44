"""Plain text for terminals and issues: the first screen; then, if asked for, tables, fixes and what was noted."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from kltest.render.changes import Changes
from kltest.render.screen import title
from kltest.render.tables import PLAIN, Terminal, paint, table, wrap
from kltest.render.words import (
    cells_of,
    expected_failures,
    note_of,
    one_line,
    passed,
    shown,
    skipped,
    time_spent,
    value_rows,
    visible,
)
from kltest.report import Report

HEADS = ("environment", "sampler", "expected gradient", "rel. bias", "cosine", "rel. variance", "")
STYLES = {"confirmed": "green", "refuted": "red", "inconclusive": "yellow", "error": "red"}
MARKS = {True: ("agrees", "green"), False: ("differs", "red"), None: ("open", "yellow")}
EXCUSED = ("expected", "yellow")
LABEL = 10
"""Width of the first screen's labels in columns."""


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    return _rendered("report.txt.j2", terminal, reports=reports).rstrip("\n")


def render_changes(changes: Changes, terminal: Terminal = PLAIN) -> str:
    """Return what changed since an earlier report, a block per target; unchanged targets share one line."""
    return _rendered("changes.txt.j2", terminal, changes=changes)


def _rendered(name: str, terminal: Terminal, **values: Any) -> str:
    from kltest.render.templating import environment  # Jinja2 is loaded when something is rendered

    def wrapped(text: str, indent: int = 0, first: str | None = None) -> Markup:
        return Markup("\n".join(wrap(visible(text), terminal, indent=" " * indent, first=first)))

    def tabulated(rows: Sequence[Sequence[str]]) -> Markup:
        return Markup(table(rows[0], [[*map(visible, row)] for row in rows[1:]], indent=2, terminal=terminal))

    made = environment(visible)
    made.filters |= {
        "wrap": wrapped,
        "labelled": lambda text, label: wrapped(text, LABEL, f"{label:<{LABEL}}"),
        "paint": lambda text, style: Markup(paint(visible(text), style, terminal)),
        "table": tabulated,
        "gradients": lambda report: _gradients(report, terminal),
        "titled": lambda report: _titled(report, terminal),
        "notes": _notes,
        "shown": shown,
    }
    made.globals |= {"terminal": terminal, "styles": STYLES}
    return made.get_template(name).render(**values)


def _titled(report: Report, terminal: Terminal) -> Markup:
    verdict, _, more = title(report).partition(" ")
    words = f"{f'{verdict.upper()} {more}'.strip()}  {one_line(report.target)}"
    text = "\n".join(wrap(words, terminal, indent=" " * LABEL, first=""))
    return Markup(text.replace(verdict.upper(), paint(verdict.upper(), STYLES[report.verdict], terminal), 1))


def _gradients(report: Report, terminal: Terminal) -> Markup:
    """A table of the rows, and their notes with the rows that each is about."""
    from rich.text import Text

    cells: list[list[str | Text]] = []
    places: dict[str, list[str]] = {}
    for row in report.gradients:
        mark, style = EXCUSED if row.excused else MARKS[row.agrees]
        cells.append([*map(visible, cells_of(row)), Text(mark, style=style)])
        places.setdefault(note_of(row), []).append(f"{row.environment} ({row.sampler})")
    lines = [table(HEADS, cells, right=HEADS[3:6], whole={*HEADS} - {"expected gradient"}, terminal=terminal)]
    for note, where in places.items():
        lines += wrap(f"{', '.join(where)}: {note}", terminal, indent="    ", first="  ") if note else []
    return Markup("\n".join(lines))


def _notes(report: Report) -> list[str]:
    found = [f"expected failure: {line}" for line in expected_failures(report)]
    found += [f"logged value: {line}" for line in value_rows(report)]
    found += map(one_line, report.notes)
    found += [f"time: {spent}"] if (spent := time_spent(report.seconds, report.calling, report.calls)) else []
    found += [f"passed: {', '.join(codes)}"] if (codes := passed(report)) else []
    return [*found, *(f"skipped: {', '.join(codes)} ({why})" for why, codes in skipped(report).items())]
