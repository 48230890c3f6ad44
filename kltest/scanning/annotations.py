"""The report of a scan for code hosts, on the lines of the terms: annotations of GitHub Actions, and SARIF 2.1.0."""

from collections.abc import Iterator

from kltest.render.github import DATA, PROPERTY
from kltest.render.sarif import Finding, document, in_checkout
from kltest.render.words import visible
from kltest.scanning.rows import OPEN, Row, Scan


def github(scan: Scan) -> str:
    """Return annotations of GitHub Actions: errors for findings, warnings for what is open, notices for the rest."""
    lines = []
    for row in scan.rows:
        level = "error" if row.status == "finding" else "warning" if row.status in OPEN else "notice"
        title = visible(f"kltest {' '.join(row.codes) or row.status}").translate(PROPERTY)
        words = " ".join([row.sentence, *(f"{code}: {row.said(code)[0]}" for code in row.codes), *row.uses])
        place = f"file={visible(in_checkout(row.file)).translate(PROPERTY)},line={row.line},endLine={row.last}"
        lines.append(f"::{level} {place},title={title}::{visible(words).translate(DATA)}\n")
    return "".join(lines)


def sarif(scan: Scan) -> str:
    """Return SARIF 2.1.0: a result an error, a warning, a known finding or a note, on the term's lines."""
    return document(
        Finding(
            *(code, level, text, row.file, row.line, row.last, row.function, (*row.key[:5], code)),
            fixes=row.fixes if level == "error" else (),
        )
        for row in scan.rows
        for code, level, text in _results(row)
    )


def _results(row: Row) -> Iterator[tuple[str, str, str]]:
    """Yield what is said of a row: code, level and words."""
    own = "error" if row.status == "finding" else "note"
    levels = {
        **dict.fromkeys(row.codes, own),
        **dict.fromkeys(row.warnings, "warning"),
        **dict.fromkeys(row.noted, "note"),
    }
    for code, level in levels.items():
        if code not in row.ignored:
            fails, found = row.said(code)
            yield code, level, " ".join(filter(None, (fails, row.sentence, found, *row.uses)))
