"""Markdown, for job summaries and issues."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kltest.render import PLAIN, Terminal
from kltest.render.changes import Changes
from kltest.render.words import (
    COLUMNS,
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
from kltest.report import CheckResult, CounterExample, Report

MARKS = {"confirmed": "✅", "refuted": "❌", "inconclusive": "❔", "error": "💥"}


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    return "\n".join(line for report in reports for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"### {MARKS[report.verdict]} {_code(report.target)}: {report.verdict}"
    yield ""
    yield f"{escape(headline(report))} · declared {_code(report.expect)} · {escape(' · '.join(settings(report)))}"
    yield ""
    if report.gradients:
        yield from _table(report)
        yield ""
    for check in (*report.failed, *report.stale):
        yield from _check(check)
    if report.smallest is not None and report.verdict != "confirmed":
        yield from _smallest(report.smallest)
    if report.error:
        first, _, rest = report.error.partition("\n")
        yield f"- **{escape(one_line(first))}**"
        if rest.strip():
            yield from ("", *(f"  {line}".rstrip() for text in _fenced(rest) for line in text.splitlines()), "")
    yield from (f"- Expected failure: {escape(line)}" for line in excuses(report))
    yield from (f"- Logged value: {escape(line)}" for line in value_rows(report))
    yield from (f"- {escape(one_line(note))}" for note in report.notes)
    yield from (f"- Skipped {', '.join(codes)}: {escape(why)}" for why, codes in skipped(report).items())
    if report.traceback:
        yield from ("", *_fenced(report.traceback))
    yield ""


def _check(check: CheckResult) -> Iterator[str]:
    """An item of a list; paragraphs and code of its own are indented by two."""
    mark = "⚠️" if is_warning(check) else "❌"
    words, code = remedy(check)
    yield f"- {mark} **{check.code} {escape(check.name)}**: {escape(one_line(check.message))}"
    if words:
        yield from ("", f"  **Fix:** {escape(words)}")
    if code:
        yield from ("", *(f"  {line}".rstrip() for text in _fenced(code, "python") for line in text.splitlines()))
    yield ""


def _smallest(found: CounterExample) -> Iterator[str]:
    """The smallest failing world as a table for pencil and paper, and the program that shows it."""
    head, *numbers = found.table()
    yield from (f"**Smallest world in which it fails:** {escape(found.setting)}.", "")
    yield "| " + " | ".join(map(escape, head)) + " |"
    yield "|---|---|" + "--:|" * (len(head) - 2)
    yield from ("| " + " | ".join(map(escape, row)) + " |" for row in numbers)
    yield ""
    if found.note:
        yield from (escape(found.note), "")
    if found.code:
        yield from ("The same without kltest (prints both gradients, a row a prefix):", "")
        yield from (*_fenced(found.code, "python"), "")


def _table(report: Report) -> Iterator[str]:
    yield "| " + " | ".join((*COLUMNS, "agrees")) + " |"
    yield "|---|---|---|--:|--:|--:|---|"
    for row in rows(report):
        agrees = {True: "yes", False: "**no**", None: "not judged"}[row.agrees]
        agrees = f"excused: {', '.join(row.excused)}" if row.excused else agrees
        agrees = f"{agrees}: {escape(row.note)}" if row.note else agrees
        yield "| " + " | ".join((*map(escape, row.cells), agrees)) + " |"


def escape(text: str) -> str:
    """Plain text that no Markdown reader takes for markup, a link, a mention or the end of a table cell."""
    escaped = re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", visible(text, keep=""))
    return escaped.replace("&", "&amp;").replace("@", "&#64;").replace("://", "&#58;//")


def _code(text: str) -> str:
    """A code span that may contain backticks; a bar is written as an entity would not be read inside it."""
    text = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall(r"`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _fenced(text: str, language: str = "") -> Iterator[str]:
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    yield from (fence + language, visible(text.rstrip()), fence)


def render_changes(changes: Changes, terminal: Terminal = PLAIN) -> str:
    """What changed since an earlier report, a table for all targets."""
    return "\n".join(_changed(changes)) + "\n"


def _changed(changes: Changes) -> Iterator[str]:
    yield from (f"### Changes since {_code(changes.since)}", "")
    moved = [change for change in changes.targets if change.status or change.differences]
    if moved:
        yield from ("| target | what | was | is |", "|---|---|---|---|")
    for change in moved:
        target = escape(one_line(change.target))
        if change.status:
            yield f"| {target} | {change.status} | | |"
        for one in change.differences:
            yield f"| {target} | {escape(one.what)} | {escape(one.was) or '–'} | {escape(one.now) or '–'} |"
    same = [escape(one_line(change.target)) for change in changes.targets if change not in moved]
    if same:
        yield from ("", f"As before: {', '.join(same)}.")
