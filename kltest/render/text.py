"""Plain text for terminals and issues: the first screen, or all of it: tables, fixes and what was noted behind it."""

import textwrap
from collections.abc import Iterator, Sequence

from kltest.render import fixes, words
from kltest.render.changes import Changes
from kltest.render.screen import headline, notation_of, screen, title
from kltest.render.tables import PLAIN, Terminal, paint, table, wrap
from kltest.render.words import one_line, visible
from kltest.report import CheckResult, CounterExample, Report

STYLES = {"confirmed": "green", "refuted": "red", "inconclusive": "yellow", "error": "red"}
LABEL = 10
"""Width of the first screen's labels in columns."""
MORE = "--verbose shows every environment, the fixes with code and the smallest failing environment"


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return reports as text for a terminal: a screen each, tables with --verbose, a line each with --quiet."""
    if terminal.quiet:
        return "\n".join("\n".join((_quiet(report, terminal), *fixes.lines(report, terminal))) for report in reports)
    blocks = []
    for report in reports:
        long = _long(report, terminal) if terminal.verbose else ()
        blocks.append([*_short(report, terminal), *long, *fixes.lines(report, terminal)])
    blocks += [[*_summary(reports, terminal)]] if len(reports) > 1 else []
    blocks += [[*_legend(reports, terminal)]] if notation_of(*reports) else []
    return "\n\n".join("\n".join(lines) for lines in blocks)


def render_changes(changes: Changes, terminal: Terminal = PLAIN) -> str:
    """Return what changed since an earlier report, a block per target; unchanged targets share one line."""
    lines = [paint(f"changes since {one_line(changes.since)}", "bold", terminal)]
    for change in changes.moved:
        lines.append(one_line(change.target) + (f": {change.status}" if change.status else ""))
        lines += [_table(change.table(), terminal)] if change.differences else []
    lines += _wrapped(f"as before: {', '.join(changes.same)}", terminal) if changes.same else []
    return "\n".join(lines) + "\n"


def _quiet(report: Report, terminal: Terminal) -> str:
    """A report on one line."""
    expected = " with expected failures" if report.verdict == "confirmed" and report.expected_failures else ""
    why = one_line(report.error) if report.error else headline(report)
    warned = f"; warnings {', '.join(check.code for check in report.warnings)}" if report.warnings else ""
    verdict = paint(report.verdict.upper(), STYLES[report.verdict], terminal)
    return f"{verdict}{expected}  {one_line(report.target)}: {visible(why)}{warned}"


def _short(report: Report, terminal: Terminal) -> Iterator[str]:
    """The first screen: the verdict, what is followed and declared, errors and warnings, and how far was looked."""
    verdict, _, more = title(report).partition(" ")
    first = f"{f'{verdict.upper()} {more}'.strip()}  {one_line(report.target)}"
    head = "\n".join(wrap(first, terminal, indent=" " * LABEL, first=""))
    yield head.replace(verdict.upper(), paint(verdict.upper(), STYLES[report.verdict], terminal), 1)
    for label, texts in screen(report, brief=not terminal.verbose).items():
        for number, text in enumerate(texts):
            yield from _labelled(text, "" if number else label, terminal)
    for text in visible(report.error).splitlines():
        yield from _wrapped(text, terminal, len(text) - len(text.lstrip()))


def _long(report: Report, terminal: Terminal) -> Iterator[str]:
    """The part behind the first screen."""
    yield from ("", *_wrapped(words.settings(report), terminal))
    if report.gradients:
        yield from ("", _gradients(report, terminal))
    for check in words.shown(report):
        yield from ("", *_check(check, terminal))
    if report.smallest:
        yield from ("", *_counter_example(report.smallest, terminal))
    for number, note in enumerate(words.remarks(report)):
        yield from ("",) if number == 0 else ()
        yield from _wrapped(note, terminal, 2, "· ")


def _gradients(report: Report, terminal: Terminal) -> str:
    from rich.text import Text

    rows: list[list[str | Text]] = []
    for row in report.gradients:
        *cells, judged = map(visible, words.cells_of(row))
        rows.append([*cells, Text(judged, style=STYLES[words.colour_of(row)])])
    return table(
        words.COLUMNS, rows, right=words.NUMERIC, whole={*words.COLUMNS} - {"expected gradient"}, terminal=terminal
    )


def _check(check: CheckResult, terminal: Terminal) -> Iterator[str]:
    """A failed check, and how to mend what it found."""
    fix, code = words.remedy(check)
    head = f"{'warning ' if check.warns else ''}{check.code} {one_line(check.name)}"
    yield paint(head, "yellow" if check.warns else "red", terminal)
    yield from _wrapped(one_line(check.message), terminal, 2)
    yield from _wrapped(f"Fix: {fix}", terminal, 2) if fix else ()
    yield from ("", _code(code)) if code else ()


def _counter_example(smallest: CounterExample, terminal: Terminal) -> Iterator[str]:
    yield paint("smallest environment in which it fails", "bold", terminal)
    yield from (*_wrapped(smallest.setting, terminal, 2), "", _table(smallest.table(), terminal))
    if smallest.note:
        yield from ("", *_wrapped(smallest.note, terminal, 2))
    if smallest.code:
        yield from ("", "  the same without kltest (prints both gradients, a row per prefix):", "")
        yield _code(visible(smallest.code))


def _summary(reports: Sequence[Report], terminal: Terminal) -> Iterator[str]:
    """A line a target: its verdict and the codes of what failed."""
    yield paint(f"{len(reports)} targets", "bold", terminal)
    width = max(len(report.verdict) for report in reports)
    for report in reports:
        codes = ", ".join(check.code for check in words.shown(report))
        verdict = paint(report.verdict.ljust(width), STYLES[report.verdict], terminal)
        yield f"{verdict}  {one_line(report.target)}" + (f"  {codes}" if codes else "")


def _legend(reports: Sequence[Report], terminal: Terminal) -> Iterator[str]:
    """The meaning of symbols, and how to see more: once for all reports."""
    yield from _labelled(notation_of(*reports), "notation", terminal)
    if not terminal.verbose:
        codes = [check.code for report in reports for check in words.shown(report)]
        yield from _labelled(f"{MORE}; kltest explain {codes[0]}" if codes else MORE, "more", terminal)


def _wrapped(text: str, terminal: Terminal, indent: int = 0, first: str | None = None) -> list[str]:
    return wrap(visible(text), terminal, indent=" " * indent, first=first)


def _labelled(text: str, label: str, terminal: Terminal) -> list[str]:
    return _wrapped(text, terminal, LABEL, f"{label:<{LABEL}}")


def _table(rows: Sequence[Sequence[str]], terminal: Terminal) -> str:
    return table(rows[0], [[*map(visible, row)] for row in rows[1:]], indent=2, terminal=terminal)


def _code(text: str) -> str:
    return textwrap.indent(text, " " * 6)
