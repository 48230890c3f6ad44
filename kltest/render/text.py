"""Plain text for terminals and issues: the first screen; then, if asked for, tables, fixes and what was noted."""

import textwrap
from collections.abc import Iterator, Sequence

from kltest.render.changes import Changes
from kltest.render.screen import headline, notation_of, screen, title
from kltest.render.tables import PLAIN, Terminal, paint, table, wrap
from kltest.render.words import (
    cells_of,
    expected_failures,
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

HEADS = ("environment", "sampler", "expected gradient", "rel. bias", "cosine", "rel. variance", "")
STYLES = {"confirmed": "green", "refuted": "red", "inconclusive": "yellow", "error": "red"}
MARKS = {True: ("agrees", "green"), False: ("differs", "red"), None: ("open", "yellow")}
EXCUSED = ("expected", "yellow")
LABEL = 10
"""Width of the first screen's labels in columns."""


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    if terminal.quiet:
        return "\n".join(_in_one_line(report, terminal) for report in reports)
    blocks = ["\n".join(_lines(report, terminal)) for report in reports]
    if len(reports) > 1:
        blocks.append("\n".join(_summary(reports, terminal)))
    return "\n\n".join([*blocks, *_ending(reports, terminal)])


def _in_one_line(report: Report, terminal: Terminal) -> str:
    words = one_line(report.error) if report.error else headline(report)
    warned = [check.code for check in report.warnings]
    words += f"; warnings {', '.join(warned)}" if warned else ""
    return f"{paint(report.verdict.upper(), STYLES[report.verdict], terminal)}  {one_line(report.target)}: {words}"


def _lines(report: Report, terminal: Terminal) -> Iterator[str]:
    first, *others = _titled(report, terminal)
    verdict = report.verdict.upper()
    yield paint(verdict, STYLES[report.verdict], terminal) + first.removeprefix(verdict)
    yield from others
    for line in screen(report):
        for label, text in zip([line.label, *[""] * len(line.texts)], line.texts, strict=False):
            yield from _labelled(label, text, terminal)
    if report.error:
        for words in visible(report.error).splitlines():
            yield from wrap(words, terminal, indent=" " * (len(words) - len(words.lstrip())))
    if report.traceback:
        yield from ("", *textwrap.indent(visible(report.traceback.rstrip()), "  ").splitlines())
    if terminal.verbose:
        yield from _everything(report, terminal)


def _titled(report: Report, terminal: Terminal) -> list[str]:
    verdict, _, more = title(report).partition(" ")
    words = f"{verdict.upper()} {more}".strip()
    return wrap(f"{words}  {one_line(report.target)}", terminal, indent=" " * LABEL, first="")


def _labelled(label: str, text: str, terminal: Terminal) -> list[str]:
    return wrap(visible(text), terminal, indent=" " * LABEL, first=f"{label:<{LABEL}}")


def _ending(reports: Sequence[Report], terminal: Terminal) -> Iterator[str]:
    """What the symbols mean, and how to see more: once for all reports."""
    lines = _labelled("notation", words, terminal) if (words := notation_of(*reports)) else []
    if not terminal.verbose and lines:
        codes = [check.code for report in reports for check in shown(report)]
        more = "--verbose shows every environment, the fixes with code and the smallest failing environment"
        more += f"; kltest explain {codes[0]}" if codes else ""
        lines += _labelled("more", more, terminal)
    if lines:
        yield "\n".join(lines)


def _everything(report: Report, terminal: Terminal) -> Iterator[str]:
    yield from ("", *wrap(settings(report), terminal))
    if report.gradients:
        yield from ("", *_gradients(report, terminal))
    for check in shown(report):
        yield from ("", *_check(check, terminal))
    if report.smallest is not None:
        yield from ("", *_counter_example(report.smallest, terminal))
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
