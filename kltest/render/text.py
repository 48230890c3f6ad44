"""Plain text for terminals and issues: the verdict first, then a row a world, then what to do."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from kltest.render import PLAIN, Terminal
from kltest.render.changes import Changes
from kltest.render.words import (
    excuses,
    headline,
    is_warning,
    one_line,
    remedy,
    rows,
    settings,
    skipped,
    value_rows,
    visible,
)
from kltest.report import CheckResult, CounterExample, Report, align

COLOURS = {"confirmed": 32, "refuted": 31, "inconclusive": 33, "error": 31, "warning": 33, "faint": 2, "bold": 1}
MARKS = {True: "agrees", False: "differs", None: "open"}
MARK_COLOURS = {True: "confirmed", False: "refuted", None: "inconclusive"}
EXCUSED = ("excused", "warning")
HEADS = ("environment", "sampler", "expected gradient", "rel. bias", "cosine", "rel. variance", "")


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    blocks = ["\n".join(_lines(report, terminal)) for report in reports]
    if len(reports) > 1:
        blocks.append("\n".join(_summary(reports, terminal)))
    return "\n\n".join(blocks)


def _lines(report: Report, terminal: Terminal) -> Iterator[str]:
    verdict = _paint(report.verdict.upper(), report.verdict, terminal)
    yield f"{verdict}  {_paint(one_line(report.target), 'bold', terminal)}"
    yield from _wrap(f"{headline(report)}.", terminal)
    yield from _wrap(f"declared {one_line(report.expect)} · {' · '.join(settings(report))}", terminal)
    if report.gradients:
        yield from ("", *_table(report, terminal))
    for check in (*report.failed, *report.stale):
        yield from ("", *_check(check, terminal))
    if report.smallest is not None and report.verdict != "confirmed":
        yield from ("", *_smallest(report.smallest, terminal))
    if report.error:
        yield ""
        for line in report.error.splitlines():
            yield from _wrap(line, terminal, indent=" " * (len(line) - len(line.lstrip())))
    if report.traceback:
        yield from ("", *textwrap.indent(visible(report.traceback.rstrip()), "  ").splitlines())
    yield from _notes(report, terminal)


def _table(report: Report, terminal: Terminal) -> Iterator[str]:
    found = rows(report)
    marks = [EXCUSED if row.excused else (MARKS[row.agrees], MARK_COLOURS[row.agrees]) for row in found]
    cells = [HEADS, *((*row.cells, mark) for row, (mark, _) in zip(found, marks, strict=True))]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(HEADS))]
    numeric = {3, 4, 5}
    for index, row in enumerate(cells):
        parts = [_pad(cell, widths[column], right=column in numeric) for column, cell in enumerate(row)]
        if index == 0:
            yield _paint("  ".join(parts).rstrip(), "faint", terminal)
            continue
        yield "  ".join([*parts[:-1], _paint(row[-1], marks[index - 1][1], terminal)]).rstrip()
        if found[index - 1].note:
            yield from _wrap(found[index - 1].note, terminal, indent=" " * (widths[0] + 2))


def _check(check: CheckResult, terminal: Terminal) -> Iterator[str]:
    colour, word = ("warning", "warning ") if is_warning(check) else ("refuted", "")
    yield _paint(f"{word}{check.code} {one_line(check.name)}", colour, terminal)
    yield from _wrap(one_line(check.message), terminal, indent="  ")
    words, code = remedy(check)
    if words:
        yield from _wrap(f"Fix: {words}", terminal, indent="  ")
    if code:
        yield from ("", *textwrap.indent(code, " " * 6).splitlines())


def _smallest(found: CounterExample, terminal: Terminal) -> Iterator[str]:
    """The smallest failing world as a table for pencil and paper, and the program that shows it."""
    yield _paint("smallest world in which it fails", "bold", terminal)
    yield from _wrap(found.setting, terminal, indent="  ")
    yield from ("", *(f"  {line}" for line in align(found.table())))
    if found.note:
        yield from ("", *_wrap(found.note, terminal, indent="  "))
    if found.code:
        yield from ("", "  the same without kltest (prints both gradients, a row a prefix):", "")
        yield from textwrap.indent(visible(found.code), " " * 6).splitlines()


def _notes(report: Report, terminal: Terminal) -> Iterator[str]:
    passed = [check.code for check in report.checks if check.status == "pass" and not check.stale]
    notes = [f"expected failure: {line}" for line in excuses(report)]
    notes += [f"logged value: {line}" for line in value_rows(report)]
    notes += [one_line(note) for note in report.notes]
    notes += [f"passed: {', '.join(passed)}"] if passed else []
    notes += [f"skipped: {', '.join(codes)} ({why})" for why, codes in skipped(report).items()]
    if notes:
        yield ""
    for note in notes:
        yield from _wrap(note, terminal, indent="  ", first="· ")


def _summary(reports: Sequence[Report], terminal: Terminal) -> Iterator[str]:
    width = max(_width(report.verdict) for report in reports)
    yield _paint(f"{len(reports)} targets", "bold", terminal)
    for report in reports:
        verdict = _paint(_pad(report.verdict, width), report.verdict, terminal)
        failed = ", ".join(check.code for check in (*report.failed, *report.stale))
        yield f"{verdict}  {one_line(report.target)}{f'  {failed}' if failed else ''}"


def render_changes(changes: Changes, terminal: Terminal = PLAIN) -> str:
    """What changed since an earlier report, a block a target; those that are as they were on one line."""
    return "\n".join(_changed(changes, terminal)) + "\n"


def _changed(changes: Changes, terminal: Terminal) -> Iterator[str]:
    yield _paint(f"changes since {one_line(changes.since)}", "bold", terminal)
    for change in changes.targets:
        if change.status:
            yield f"{one_line(change.target)}: {change.status}"
        elif change.differences:
            yield one_line(change.target)
            width = max(_width(difference.what) for difference in change.differences)
            for what, was, now in ((one.what, one.was, one.now) for one in change.differences):
                yield f"  {_pad(what, width)}  {was or '–'} → {now or '–'}"
    same = [one_line(change.target) for change in changes.targets if not (change.status or change.differences)]
    if same:
        yield from _wrap(f"as before: {', '.join(same)}", terminal)


def _wrap(text: str, terminal: Terminal, *, indent: str = "", first: str | None = None) -> list[str]:
    """Broken at spaces only: a name, a path or a number longer than the line stays whole, to be copied."""
    return textwrap.wrap(
        visible(text).strip(),
        max(terminal.width, 40),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _width(text: str) -> int:
    """Columns on a terminal: combining marks take none, wide characters two."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _pad(text: str, width: int, *, right: bool = False) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def _paint(text: str, colour: str, terminal: Terminal) -> str:
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if terminal.colour and text else text
