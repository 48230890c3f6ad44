"""GitHub Actions annotations: `::error` for a failed check, `::warning` for a warning, `::notice` for the rest."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kltest.render import PLAIN, Terminal
from kltest.render.words import cells_of, expected_failures, headline, reason, visible
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
    path = re.match(r"(.+\.py):\w", report.target)
    file = f"file={_escape(_in_repository(path[1]), PROPERTY)}," if path else ""
    return f"::{level} {file}title={_escape(title, PROPERTY)}::{_escape(message, DATA)}"


def _in_repository(path: str) -> str:
    """The path from the root of the checkout, as GitHub wants it, whatever the working directory."""
    root, file = os.environ.get("GITHUB_WORKSPACE", ""), Path(path).resolve()
    inside = root and file.is_relative_to(Path(root).resolve())
    return file.relative_to(Path(root).resolve()).as_posix() if inside else path


def _escape(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(character, character) for character in visible(text, keep="\r\n"))
