"""What a scan says, in each format: text, json, markdown, github and sarif."""

import json
from collections.abc import Callable
from typing import Any

from kltest import __version__
from kltest.render.tables import PLAIN, Terminal, table
from kltest.scanning.scan import OPEN, Row, Scan

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def text(scan: Scan, terminal: Terminal = PLAIN) -> str:
    """Return a table of the terms, what was not read, and one line that counts."""
    lines: list[str] = []
    if scan.rows:
        cells = [
            [f"{row.spot or row.file}\n{row.function}{' [' + row.variant + ']' if row.variant else ''}",
             f"{row.place}: {_short(row.formula)}", *_gradients(row), _findings(row)] for row in scan.rows
        ]  # fmt: skip
        heads = ("where", "term", "follows", "under a stale sampler", "findings")
        lines.append(table(heads, cells, whole=(), terminal=terminal))
    for row in scan.rows:
        if terminal.verbose and row.result.lifted.source:
            lines += [
                "",
                f"{row.spot} [{row.variant}]",
                row.result.lifted.source,
                *(f"# {n}" for n in row.result.lifted.notes),
            ]
        for code in row.codes if row.status == "finding" else ():
            lines.append(f"{row.spot}: {code}: {row.result.messages.get(code, '')}")
    lines += [f"not read: {line}" for line in scan.left_out]
    lines.append(summary(scan))
    return "\n".join(lines) + "\n"


def summary(scan: Scan) -> str:
    """Return one line: how many terms of how many files, and what became of them."""
    counts: dict[str, int] = {}
    for row in scan.rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    told = ", ".join(f"{number} {status}" for status, number in counts.items()) or "none"
    terms = len({(row.file, row.line) for row in scan.rows})
    return f"{terms} KL terms in {scan.files} files ({scan.lines:,} lines); variants: {told}"


def markdown(scan: Scan) -> str:
    """Return a Markdown table and the line that counts."""
    rows = ["| where | term | follows | under a stale sampler | findings |", "| --- | --- | --- | --- | --- |"]
    for row in scan.rows:
        variant = f" `{row.variant}`" if row.variant else ""
        cells = [
            f"`{row.spot}` {row.function}{variant}",
            f"{row.place}: `{_short(row.formula)}`",
            *_gradients(row),
            _findings(row),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    body = "\n".join(rows) + "\n\n" if scan.rows else ""
    return f"{body}{summary(scan)}\n" + "".join(f"- not read: {line}\n" for line in scan.left_out)


def as_json(scan: Scan) -> str:
    """Return the scan as JSON, schema kltest.scan/1."""
    return json.dumps(scan.to_dict(), indent=2, ensure_ascii=False) + "\n"


def github(scan: Scan) -> str:
    """Return annotations of GitHub Actions on the lines of the terms."""
    from kltest.render.github import DATA, PROPERTY
    from kltest.render.words import visible

    lines = []
    for row in scan.rows:
        level = "error" if row.status == "finding" else "warning" if row.status in OPEN else "notice"
        title = visible(f"kltest {' '.join(row.codes) or row.status}").translate(PROPERTY)
        place = f"file={visible(row.file).translate(PROPERTY)},line={row.line},endLine={row.last}"
        lines.append(f"::{level} {place},title={title}::{visible(_sentence(row)).translate(DATA)}")
    return "".join(f"{line}\n" for line in lines)


def sarif(scan: Scan) -> str:
    """Return the findings as SARIF 2.1.0: a rule a check, a result an error or warning on the term's lines."""
    from kltest.checks import CHECKS

    results: list[dict[str, Any]] = []
    for row in scan.rows:
        found = [(code, "error") for code in row.codes] + [(code, "warning") for code in row.result.warnings]
        if row.status == "finding" and not row.codes:
            found.insert(0, ("KL105", "error"))
        for code, level in found if row.status in ("finding", "known") else ():
            results.append({
                "ruleId": code,
                "level": "note" if row.known else level,
                "message": {"text": f"{_sentence(row)} {row.result.messages.get(code, '')}".strip()},
                "locations": [{"physicalLocation": {
                    "artifactLocation": {"uri": row.file, "uriBaseId": "%SRCROOT%"},
                    "region": {"startLine": row.line, "endLine": row.last},
                }}],
                "partialFingerprints": {"kltest/1": row.key},
            })  # fmt: skip
    used = sorted({result["ruleId"] for result in results})
    rules = [{"id": code, "name": CHECKS[code].name, "shortDescription": {"text": CHECKS[code].what}} for code in used]
    driver = {"name": "kltest", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "utf16CodeUnits"}
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Scan], str]] = {
    "text": text, "json": as_json, "markdown": markdown, "github": github, "sarif": sarif,
}  # fmt: skip


def _short(formula: str, most: int = 120) -> str:
    return formula if len(formula) <= most else f"{formula[: most - 1]}…"


def _gradients(row: Row) -> tuple[str, str]:
    told = row.result.gradients
    if not told:
        why = row.result.why.split("\n")[0]
        return f"{row.result.status}: {why}" if why else row.result.status, ""
    return told.get("current", ""), told.get("stale", "")


def _findings(row: Row) -> str:
    told = [*row.codes, *(f"{code} (warning)" for code in row.result.warnings)]
    told += [f"{code} ignored: {why}" for code, why in row.ignored.items()]
    if row.known:
        told.append("(in the baseline)")
    if row.guessed:
        told.append("sides guessed")
    return ", ".join(told) or ("–" if row.status != "finding" else "another gradient than ∇KL(π‖ref)")


def _sentence(row: Row) -> str:
    current, stale = _gradients(row)
    variant = f" [{row.variant}]" if row.variant else ""
    under = f"; under a stale sampler {stale}" if stale else ""
    return f"KL term in the {row.place}{variant}: follows {current}{under}. {_findings(row)}"
