"""What a scan says to code hosts, on the lines of the terms: annotations of GitHub Actions, and SARIF 2.1.0."""

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kltest import __version__
from kltest.files import as_json
from kltest.render.github import DATA, PROPERTY
from kltest.render.words import visible
from kltest.scanning.rows import OPEN, Row, Scan

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_RESULTS = 5000
"""Results that code scanning of GitHub shows of one run."""


def github(scan: Scan) -> str:
    """Return annotations of GitHub Actions: errors for findings, warnings for what is open, notices for the rest."""
    lines = []
    for row in scan.rows:
        level = "error" if row.status == "finding" else "warning" if row.status in OPEN else "notice"
        title = visible(f"kltest {' '.join(row.codes) or row.status}").translate(PROPERTY)
        place = f"file={visible(_in_checkout(row.file)).translate(PROPERTY)},line={row.line},endLine={row.last}"
        lines.append(f"::{level} {place},title={title}::{visible(row.sentence).translate(DATA)}\n")
    return "".join(lines)


def sarif(scan: Scan) -> str:
    """Return SARIF 2.1.0: a rule a check, a result an error or warning on the term's lines; errors come first."""
    from kltest.checks import CHECKS

    found = [(row, code, "note" if row.status == "known" else "error")
             for row in scan.rows if row.status in ("finding", "known") for code in row.codes]  # fmt: skip
    found += [(row, code, "warning") for row in scan.rows for code in row.warnings if code not in row.ignored]
    found = sorted(found, key=lambda each: ("error", "warning", "note").index(each[2]))[:MOST_RESULTS]
    codes = sorted({code for _, code, _ in found})
    rules = [_rule(CHECKS[code]) for code in codes]
    driver = {"name": "kltest", "version": __version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The root of the checkout."}}},
        "results": [_result(row, code, level, codes.index(code)) for row, code, level in found],
        "columnKind": "unicodeCodePoints",
    }
    return as_json({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(check: Any) -> dict[str, Any]:
    explained = f"{check.what}\n\n{check.why}\n\n{check.fix}"
    return {
        "id": check.code,
        "name": check.name,
        "shortDescription": {"text": f"{check.title}."},
        "fullDescription": {"text": check.what},
        "help": {"text": f"{explained}\n\n`kltest explain {check.code}` says more."},
        "defaultConfiguration": {"level": check.level},
    }


def _result(row: Row, code: str, level: str, number: int) -> dict[str, Any]:
    # Lines move; file, function, configuration and formula say which term it is.
    known_by = hashlib.sha256("\0".join((*row.key[:5], code)).encode()).hexdigest()[:32]
    return {
        "ruleId": code,
        "ruleIndex": number,
        "level": level,
        "message": {"text": f"{row.sentence} {row.messages.get(code, '')}".strip()},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": _artifact(row.file),
                    "region": {"startLine": row.line, "endLine": row.last},
                },
                "logicalLocations": [{"fullyQualifiedName": row.function, "kind": "function"}],
            }
        ],
        "partialFingerprints": {"kltest/1": known_by},
    }


def _artifact(file: str) -> dict[str, str]:
    path = _in_checkout(file)
    if Path(path).is_absolute():
        return {"uri": Path(path).as_uri()}
    return {"uri": quote(path), "uriBaseId": "%SRCROOT%"}


def _in_checkout(file: str) -> str:
    """Return the path of a file from the root of the checkout, or from the root of the system if it lies elsewhere."""
    root, path = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve(), Path(file).resolve()
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()
