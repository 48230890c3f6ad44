"""GitHub Actions annotations: `::error` for a failed check, `::warning` for a warning, `::notice` for the rest."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kltest.render import PLAIN, Terminal
from kltest.render.screen import headline
from kltest.render.words import cells_of, expected_failures, reason, visible
from kltest.report import Report

DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
PROPERTY = {**DATA, ":": "%3A", ",": "%2C"}


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    return "".join(line + "\n" for report in reports for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    errors = 0
    for check in (*report.failed, *report.unexpected_passes):
        level = "warning" if check.warns and not check.passed_unexpectedly else "error"
        errors += level == "error"
        yield _annotation(level, report, f"{check.code} {check.name}", f"{report.target}: {reason(check)}")
    for check, line in zip(report.expected_failures, expected_failures(report), strict=True):
        yield _annotation("notice", report, f"{check.code} {check.name}", f"{report.target}: expected failure: {line}")
    if report.verdict == "confirmed":
        yield _annotation("notice", report, "kltest confirmed", f"{report.target}: {headline(report)}")
    elif not errors:
        wrong = ["{}, {}: {}".format(*cells_of(row)) for row in report.gradients if row.refutes]
        detail = "\n".join([report.error or headline(report), *wrong, *report.notes])
        yield _annotation("error", report, f"kltest {report.verdict}", f"{report.target}: {detail}")


def _annotation(level: str, report: Report, title: str, message: str) -> str:
    return f"::{level} {_place(report)}title={_escape(title, PROPERTY)}::{_escape(message, DATA)}"


def _place(report: Report) -> str:
    """File and line of the loss, its path from the root of the checkout as GitHub wants it; "" if it lies elsewhere."""
    given = re.match(r"(.+\.py):\w", report.target)
    path, line = report.source or (given[1] if given else "", 0)
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    if not path or not Path(path).resolve().is_relative_to(root):
        return ""
    file = _escape(Path(path).resolve().relative_to(root).as_posix(), PROPERTY)
    return f"file={file},line={line}," if line else f"file={file},"


def _escape(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(character, character) for character in visible(text, keep="\r\n"))
