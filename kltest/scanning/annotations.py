"""The report of a scan for code hosts, on the lines of the terms: annotations of GitHub Actions, and SARIF 2.1.0."""

from kltest.render.github import DATA, PROPERTY
from kltest.render.sarif import Finding, document, in_checkout
from kltest.render.words import visible
from kltest.scanning.rows import OPEN, Scan


def github(scan: Scan) -> str:
    """Return annotations of GitHub Actions: errors for findings, warnings for what is open, notices for the rest."""
    lines = []
    for row in scan.rows:
        level = "error" if row.status == "finding" else "warning" if row.status in OPEN else "notice"
        codes = row.codes if row.status in ("finding", "known") else []
        title = visible(f"kltest {' '.join(codes) or row.status}").translate(PROPERTY)
        words = " ".join([row.sentence, *(f"{code}: {row.said(code)[0]}" for code in codes)])
        place = f"file={visible(in_checkout(row.file)).translate(PROPERTY)},line={row.line},endLine={row.last}"
        lines.append(f"::{level} {place},title={title}::{visible(words).translate(DATA)}\n")
    return "".join(lines)


def sarif(scan: Scan) -> str:
    """Return SARIF 2.1.0: a result an error, a warning or a known finding, on the term's lines."""
    found = [
        (row, code, "note" if row.status == "known" else "error")
        for row in scan.rows
        if row.status in ("finding", "known")
        for code in row.codes
    ]
    found += [(row, code, "warning") for row in scan.rows for code in row.warnings if code not in row.ignored]
    return document(
        Finding(
            code,
            level,
            " ".join(filter(None, (row.said(code)[0], row.sentence, row.said(code)[1]))),
            row.file,
            row.line,
            row.last,
            row.function,
            (*row.key[:5], code),
        )
        for row, code, level in found
    )
