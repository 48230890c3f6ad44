"""SARIF 2.1.0, which code scanning shows on the lines of the losses: a rule a check, a result a finding."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kltest.files import as_json
from kltest.render.tables import PLAIN, Terminal
from kltest.render.words import visible
from kltest.report import Fix, Report
from kltest.version import VERSION

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = ("error", "warning", "note")
CONFIRMED = "kltest-confirmed"
"""Code of a finding that says that nothing is wrong, which is no result."""
MOST_RESULTS = 5000
"""Results that code scanning of GitHub shows of one run."""
# Findings that are no check's.
VERDICTS = {
    "kltest-error": ("not-graded", "The loss could not be graded."),
    "kltest-inconclusive": ("inconclusive", "Whether the loss follows the declared gradient could not be told."),
    "kltest-refuted": ("other-gradient", "The loss does not follow the declared gradient."),
}


@dataclass(frozen=True)
class Finding:
    """One finding: a check's code, or a key of VERDICTS, on lines of a file ("" if it has none).

    `known_by` says which finding it is whatever its lines are, which move. A line of 0 is not known.
    """

    code: str
    level: str
    text: str
    file: str
    first: int
    last: int
    function: str
    known_by: Sequence[str]
    title: str = ""
    fixes: Sequence[Fix] = ()


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return reports as a SARIF log, a result for each failed check."""
    return document(found for report in reports for found in findings(report) if found.code != CONFIRMED)


def document(found: Iterable[Finding]) -> str:
    """Return the whole document; errors come first."""
    ordered = sorted(found, key=lambda each: LEVELS.index(each.level))[:MOST_RESULTS]
    codes = sorted({each.code for each in ordered})
    run = {
        "tool": {"driver": {"name": "kltest", "version": VERSION, "rules": [_rule(code) for code in codes]}},
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The root of the checkout."}}},
        "results": [_result(each, codes.index(each.code)) for each in ordered],
        "columnKind": "unicodeCodePoints",
    }
    return as_json({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def in_checkout(file: str) -> str:
    """Return the path of a file from the root of the checkout, or from the root of the system if it lies elsewhere."""
    root, path = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve(), Path(file).resolve()
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def findings(report: Report) -> Iterator[Finding]:
    """Yield a finding for each check that failed or passed unexpectedly, and for the verdict if none explains it."""
    from kltest.render import screen, words

    given = re.match(r"(.+\.py):\w", report.target)
    path, line = report.source or (given[1] if given else "", 0)
    target = in_checkout(given[1]) + report.target[given.end(1) :] if given else report.target

    fixes = tuple(report.fixes)

    def found(code: str, level: str, text: str, title: str) -> Finding:
        text = f"{report.target}: {text}"
        return Finding(
            code, level, text, path, line, line, report.target, (target, code), title, fixes if level == "error" else ()
        )

    for check in (*report.failed, *report.unexpected_passes):
        warns = check.warns and not check.passed_unexpectedly
        yield found(check.code, "warning" if warns else "error", words.reason(check), f"{check.code} {check.name}")
    for check, text in zip(report.expected_failures, words.expected_failures(report), strict=True):
        yield found(check.code, "note", f"expected failure: {text}", f"{check.code} {check.name}")
    if not (report.errors or report.unexpected_passes):
        level = {"confirmed": "note", "inconclusive": "warning"}.get(report.verdict, "error")
        words_of_it = report.error or screen.headline(report)
        yield found(f"kltest-{report.verdict}", level, words_of_it, f"kltest {report.verdict}")


def _rule(code: str) -> dict[str, Any]:
    from kltest.checks import CHECKS

    if code in VERDICTS:
        name, words = VERDICTS[code]
        return {"id": code, "name": name, "shortDescription": {"text": words}}
    check = CHECKS[code]
    explained = f"{check.what}\n\n{check.why}\n\n{check.fix}"
    return {
        "id": check.code,
        "name": check.name,
        "shortDescription": {"text": f"{check.title}."},
        "fullDescription": {"text": check.what},
        "help": {"text": f"{explained}\n\n`kltest explain {check.code}` says more."},
        "defaultConfiguration": {"level": check.level},
    }


def _result(found: Finding, number: int) -> dict[str, Any]:
    known_by = "\0".join(found.known_by).encode("utf-8", "backslashreplace")
    function = {"fullyQualifiedName": visible(found.function), "kind": "function"}
    place: dict[str, Any] = {"logicalLocations": [function]}
    if found.file:
        region = {"startLine": max(found.first, 1), "endLine": max(found.last, 1)}
        place["physicalLocation"] = {"artifactLocation": _artifact(found.file), "region": region}
    result = {
        "ruleId": found.code,
        "ruleIndex": number,
        "level": found.level,
        "message": {"text": visible(found.text)},
        "locations": [place],
        "partialFingerprints": {"kltest/1": hashlib.sha256(known_by).hexdigest()[:32]},
    }
    return {**result, "fixes": [_fix(fix) for fix in found.fixes]} if found.fixes else result


def _fix(fix: Fix) -> dict[str, Any]:
    """The lines of a fix: from the first to the beginning of the one behind the last, nothing if it is inserted."""
    region = {"startLine": fix.first, "startColumn": 1, "endLine": fix.last + 1, "endColumn": 1}
    change = {"deletedRegion": region, "insertedContent": {"text": fix.text}}
    words = {"text": visible(f"{fix.words}; {fix.value}")}
    return {
        "description": words,
        "artifactChanges": [{"artifactLocation": _artifact(fix.file), "replacements": [change]}],
    }


def _artifact(file: str) -> dict[str, str]:
    path = in_checkout(file)
    if Path(path).is_absolute():
        return {"uri": Path(path).as_uri()}
    return {"uri": quote(path, errors="replace"), "uriBaseId": "%SRCROOT%"}
