"""Plain text for terminals and issues: the verdict first, then a row per environment, then what to do."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kltest.render.changes import Changes
from kltest.render.tables import PLAIN, Terminal, paint, table, wrap
from kltest.render.words import (
    cells_of,
    expected_failures,
    headline,
    note_of,
    one_line,
    passed,
    remedy,
    settings,
    shown,
    skipped,
    value_rows,
    visible,
)
from kltest.report import CheckResult, CounterExample, Report

if TYPE_CHECKING:
    pass

HEADS = ("environment", "sampler", "expected gradient", "rel. bias", "cosine", "rel. variance", "")
STYLES = {"confirmed": "green", "refuted": "red", "inconclusive": "yellow", "error": "red"}
MARKS = {True: ("agrees", "green"), False: ("differs", "red"), None: ("open", "yellow")}
EXCUSED = ("excused", "yellow")


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    blocks = ["\n".join(_lines(report, terminal)) for report in reports]
    if len(reports) > 1:
        blocks.append("\n".join(_summary(reports, terminal)))
    return "\n\n".join(blocks)


def _lines(report: Report, terminal: Terminal) -> Iterator[str]:
    verdict = paint(report.verdict.upper(), STYLES[report.verdict], terminal)
    if report.verdict == "confirmed" and report.expected_failures:
        verdict += " with an expected failure" + "s" * (len(report.expected_failures) > 1)
    yield f"{verdict}  {paint(one_line(report.target), 'bold', terminal)}"
    yield from wrap(f"{headline(report)}.", terminal)
    yield from wrap(f"declared {one_line(report.expect)} · {settings(report)}", terminal)
    if report.gradients:
        yield from ("", *_gradients(report, terminal))
    for check in shown(report):
        yield from ("", *_check(check, terminal))
    if report.smallest is not None and report.verdict != "confirmed":
        yield from ("", *_counter_example(report.smallest, terminal))
    if report.error:
        yield ""
        for line in visible(report.error).splitlines():
            yield from wrap(line, terminal, indent=" " * (len(line) - len(line.lstrip())))
    if report.traceback:
        yield from ("", *textwrap.indent(visible(report.traceback.rstrip()), "  ").splitlines())
    notes = list(_notes(report))
    yield from [""] * bool(notes)
    for note in notes:
        yield from wrap(note, terminal, indent="  ", first="· ")


def _gradients(report: Report, terminal: Terminal) -> Iterator[str]:
    from rich.text import Text

    cells: list[list[str | Text]] = []
    places: dict[str, list[str]] = {}
    for row in report.gradients:
        mark, style = EXCUSED if row.excused else MARKS[row.agrees]
        cells.append([*map(visible, cells_of(row)), Text(mark, style=style)])
        places.setdefault(note_of(row), []).append(f"{row.environment} ({row.sampler})")
    yield table(HEADS, cells, right=HEADS[3:6], whole={*HEADS} - {"expected gradient"}, terminal=terminal)
    for note, where in places.items():
        if note:
            yield from wrap(f"{', '.join(where)}: {note}", terminal, indent="    ", first="  ")


def _check(check: CheckResult, terminal: Terminal) -> Iterator[str]:
    style, kind = ("yellow", "warning ") if check.warns else ("red", "")
    yield paint(f"{kind}{check.code} {one_line(check.name)}", style, terminal)
    yield from wrap(one_line(check.message), terminal, indent="  ")
    words, code = remedy(check)
    if words:
        yield from wrap(f"Fix: {words}", terminal, indent="  ")
    if code:
        yield from ("", *textwrap.indent(code, " " * 6).splitlines())


def _counter_example(found: CounterExample, terminal: Terminal) -> Iterator[str]:
    """The smallest environment that shows the failure: its numbers, and the program that computes them."""
    yield paint("smallest environment in which it fails", "bold", terminal)
    yield from wrap(found.setting, terminal, indent="  ")
    head, *numbers = found.table()
    yield from ("", table(head, [[*map(visible, row)] for row in numbers], indent=2, terminal=terminal))
    if found.note:
        yield from ("", *wrap(visible(found.note), terminal, indent="  "))
    if found.code:
        yield from ("", "  the same without kltest (prints both gradients, a row per prefix):", "")
        yield from textwrap.indent(visible(found.code), " " * 6).splitlines()


def _notes(report: Report) -> Iterator[str]:
    yield from (f"expected failure: {line}" for line in expected_failures(report))
    yield from (f"logged value: {line}" for line in value_rows(report))
    yield from map(one_line, report.notes)
    if codes := passed(report):
        yield f"passed: {', '.join(codes)}"
    yield from (f"skipped: {', '.join(codes)} ({why})" for why, codes in skipped(report).items())


def _summary(reports: Sequence[Report], terminal: Terminal) -> Iterator[str]:
    width = max(len(report.verdict) for report in reports)
    yield paint(f"{len(reports)} targets", "bold", terminal)
    for report in reports:
        verdict = paint(report.verdict.ljust(width), STYLES[report.verdict], terminal)
        codes = ", ".join(check.code for check in shown(report))
        yield f"{verdict}  {one_line(report.target)}{f'  {codes}' if codes else ''}"


def render_changes(changes: Changes, terminal: Terminal = PLAIN) -> str:
    """Return what changed since an earlier report, a block per target; unchanged targets share one line."""
    return "\n".join(_changed(changes, terminal)) + "\n"


def _changed(changes: Changes, terminal: Terminal) -> Iterator[str]:
    yield paint(f"changes since {one_line(changes.since)}", "bold", terminal)
    for change in changes.moved:
        if change.status:
            yield f"{one_line(change.target)}: {change.status}"
        else:
            yield one_line(change.target)
            cells = [(one.what, f"{one.was or '–'} → {one.now or '–'}") for one in change.differences]
            yield table(("", ""), cells, indent=2, terminal=terminal)
    if changes.same:
        yield from wrap(f"as before: {', '.join(changes.same)}", terminal)
