"""Differences between an earlier report and a new one, in words: verdicts, gradients, bias, variance, checks."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kltest.errors import UsageError
from kltest.render.words import gradient, number, one_line
from kltest.report import READABLE, SCHEMA, Report

# The same loss on another machine differs by rounding: relative to a number, or up to a bias that counts as zero.
ROUNDING, NO_BIAS = 1e-6, 1e-9
SETTINGS = ("expect", "placement", "credit", "seed")
"""Settings whose change is reported, since it explains the others."""
FAILING = {"fail", "fail, excused"}


@dataclass(frozen=True)
class Difference:
    """One thing that changed, as text; `was` or `now` is empty if there was or is nothing."""

    what: str
    was: str
    now: str


@dataclass(frozen=True)
class Change:
    """A target and its differences; `status` says if it is new or not graded now."""

    target: str
    status: str = ""
    differences: tuple[Difference, ...] = ()

    def table(self) -> list[tuple[str, str]]:
        """Return the differences as a table of two columns without heads."""
        return [("", ""), *((one.what, f"{one.was or '–'} → {one.now or '–'}") for one in self.differences)]


@dataclass(frozen=True)
class Changes:
    """The changes since the report in a file, a `Change` per target, with or without differences."""

    since: str
    targets: tuple[Change, ...]

    @property
    def moved(self) -> list[Change]:
        """The targets with a change."""
        return [change for change in self.targets if change.status or change.differences]

    @property
    def same(self) -> list[str]:
        """The names of the targets without a change."""
        return [one_line(change.target) for change in self.targets if change not in self.moved]


def read(path: str) -> list[dict[str, Any]]:
    """Return the earlier reports in a file that `kltest grade` wrote as JSON: one object, or an array of several.

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
    if report.get("schema") not in READABLE:
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


def compare(path: str, old: Sequence[Mapping[str, Any]], reports: Sequence[Report]) -> Changes:
    """Compare reports, matched by the name of the target, and by order if a name occurs several times.

    Args:
        path: File of the old reports.
        old: The old reports as JSON; keys that another version did not write are not compared.
        reports: The new reports.
    """
    waiting: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in old:
        waiting[entry["target"]].append(entry)
    targets = []
    for report in reports:
        earlier = waiting[report.target]
        differences = tuple(_differences(earlier.pop(0), report.to_dict())) if earlier else None
        targets.append(Change(report.target, "new" if differences is None else "", differences or ()))
    targets += [Change(entry["target"], "not graded now") for left in waiting.values() for entry in left]
    return Changes(path, tuple(targets))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for key in ("verdict", *SETTINGS):
        if key in old and old[key] != new[key]:
            yield Difference(key, _words(old[key]), _words(new[key]))
    rows, earlier = _by_place(new["gradients"]), _by_place(old["gradients"])
    for place in {**rows, **earlier}:
        yield from _of_row(place, earlier.get(place), rows.get(place))
    checks, before = ({check["code"]: check for check in report["checks"]} for report in (new, old))
    for code in sorted({*checks, *before}):
        was, now = (_status(found.get(code)) for found in (before, checks))
        # A check that is new, or not selected any more, is worth a line only if it failed or fails.
        if was != now and (FAILING & {was, now} or {"pass", "skip", "inconclusive"} >= {was, now}):
            name = (checks.get(code) or before[code]).get("name", "")
            yield Difference(one_line(f"{code} {name}"), was, now)


def _of_row(place: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> Iterator[Difference]:
    if not (old and new and _same_gradient(old.get("identified"), new.get("identified"))):
        yield Difference(f"gradient, {place}", _identified(old), _identified(new))
    for key, least in (("relative_bias", NO_BIAS), ("relative_variance", 0.0)):
        if old and new and key in old and not _same_number(old[key], new[key], least):
            yield Difference(f"{key.replace('_', ' ')}, {place}", _number(old[key]), _number(new[key]))


def _status(check: Mapping[str, Any] | None) -> str:
    if check is None:
        return ""
    return "fail, excused" if check["status"] == "fail" and check.get("excused") else check["status"]


def _by_place(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    places = {}
    for row in rows:
        batch = row.get("batch", 1)
        batches = f", batches of {batch}" if batch != 1 else ""
        places[one_line(f"{row['environment']} ({row['sampler']}{batches})")] = row
    return places


def _identified(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    names = row.get("identified")
    try:
        return one_line(gradient(names))
    except (KeyError, UsageError):  # a name of another version
        return one_line(json.dumps(names, ensure_ascii=False))


def _same_gradient(old: Mapping[str, float] | None, new: Mapping[str, float] | None) -> bool:
    if not old or not new:
        return not old and not new
    return old.keys() == new.keys() and all(_same_number(old[name], new[name]) for name in old)


def _same_number(old: object, new: object, least: float = 0.0) -> bool:
    if not is_number(old) or not is_number(new):
        return not is_number(old) and not is_number(new)
    return abs(old - new) <= max(least, ROUNDING * max(abs(old), abs(new)))


def is_number(value: object) -> TypeGuard[int | float]:
    """True if a value of JSON is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _number(value: object) -> str:
    return number(float(value) if is_number(value) else None)


def _words(value: object) -> str:
    return "none" if value is None else one_line(str(value))
