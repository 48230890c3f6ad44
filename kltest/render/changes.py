"""Differences between an earlier report and a new one, in words: verdicts, gradients, bias, variance, checks."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kltest.errors import UsageError
from kltest.render.words import UNNAMED, number, one_line
from kltest.report import READABLE, SCHEMA, Report
from kltest.truth import render

# The same loss on another machine differs by rounding: relative to a number, or up to a bias that counts as zero.
ROUNDING, NO_BIAS = 1e-6, 1e-9
SETTINGS = ("expect", "placement", "credit", "seed")
"""Settings whose change is reported, since it explains the others."""
GRADIENT, FAILING = "gradient, ", "fail"


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
    parts = {"gradients": ("environment", "sampler"), "checks": ("code", "status")}
    if lacking := [key for key in parts if not isinstance(report.get(key), list)]:
        return f"its {lacking[0]} are not a list"
    entries = {"report": [report], **{key: report[key] for key in parts}}
    for key, needed in {"report": ("target", "verdict"), **parts}.items():
        for entry in entries[key]:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in needed):
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
    earlier, present = _facts(old), _facts(new)
    for name in {**present, **earlier}:
        (was, before), (now, after) = (facts.get(name, (None, "")) for facts in (earlier, present))
        # A row that only one of them has is worth a line if it is a gradient or a failure.
        notable = name.startswith(GRADIENT) or (before or after).startswith(FAILING)
        if not _same(was, now) if before and after else notable:
            yield Difference(name, before, after)


def _facts(report: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return what is compared by its name, with its words."""
    facts = {key: (report[key], _words(report[key])) for key in ("verdict", *SETTINGS) if key in report}
    for row in report["gradients"]:
        batches = f", batches of {row['batch']}" if row.get("batch", 1) != 1 else ""
        place = one_line(f"{row['environment']} ({row['sampler']}{batches})")
        facts[GRADIENT + place] = (row.get("identified") or None, _identified(row.get("identified")))
        for key in ("relative_bias", "relative_variance"):
            if key in row:
                value = row[key] if is_number(row[key]) else None
                facts[f"{key.replace('_', ' ')}, {place}"] = (value, number(None if value is None else float(value)))
    for check in report["checks"]:
        status = "fail, excused" if check["status"] == FAILING and check.get("excused") else check["status"]
        facts[one_line(f"{check['code']} {check.get('name', '')}")] = (status, status)
    return facts


def _identified(names: Mapping[str, float] | None) -> str:
    try:
        return render(dict(names)) if names else UNNAMED
    except (KeyError, UsageError):  # a name of another version
        return one_line(json.dumps(names, ensure_ascii=False))


def _same(old: Any, new: Any) -> bool:
    """True if two values are equal, numbers and those of combinations up to rounding."""
    if is_number(old) and is_number(new):
        return abs(old - new) <= max(NO_BIAS, ROUNDING * max(abs(old), abs(new)))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(old[name], new[name]) for name in old)
    return bool(old == new)


def is_number(value: object) -> TypeGuard[int | float]:
    """True if a value of JSON is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _words(value: object) -> str:
    return "none" if value is None else one_line(str(value))
