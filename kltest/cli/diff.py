"""Earlier reports, read from the JSON of `kltest grade`: one object, or an array for several targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kltest.errors import UsageError
from kltest.render.changes import is_number
from kltest.render.words import one_line
from kltest.report import SCHEMA


def read(path: str) -> list[dict[str, Any]]:
    """Return the reports in a file.

    Raises:
        UsageError: If the file cannot be read or holds something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise UsageError(f"--diff: {path!r} cannot be read as JSON ({reason})") from None
    reports = found if isinstance(found, list) else [found]
    for place, report in enumerate(reports, 1):
        if fault := _fault(report):
            which = f"entry {place} of {path!r}" if isinstance(found, list) else repr(path)
            raise UsageError(
                f"--diff: {which} is not a report of kltest: {fault}; give what `kltest grade --output json:FILE` wrote"
            )
    if not reports:
        raise UsageError(f"--diff: there is no report in {path!r}")
    return reports


def _fault(report: object) -> str:
    """Reason why an object cannot be compared, empty if it can."""
    if not isinstance(report, dict):
        return "it is not an object"
    if report.get("schema") != SCHEMA:
        return f"its schema is {report.get('schema')!r}, not {SCHEMA!r}"
    for key in ("target", "verdict"):
        if not isinstance(report.get(key), str):
            return f"its {key} is not a text"
    parts = (("gradients", ("environment", "sampler")), ("checks", ("code", "status")))
    for key, needed in parts:
        entries = report.get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            return f"its {key} are not a list of objects"
        if not all(isinstance(entry.get(name), str) for entry in entries for name in needed):
            return f"one of its {key} lacks {' or '.join(needed)}"
    for row in report["gradients"]:
        identified = row.get("identified")
        if not (identified is None or (isinstance(identified, dict) and all(map(is_number, identified.values())))):
            return f"a gradient of it is identified as {identified!r}"
    return ""
