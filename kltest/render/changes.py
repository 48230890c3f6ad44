"""Differences between an earlier report and a new one, in words: verdicts, gradients, bias, variance, checks."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kltest.errors import UsageError
from kltest.render.words import gradient, number, one_line
from kltest.report import Report

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
    if old is None or new is None:
        yield Difference(f"gradient, {place}", _identified(old), _identified(new))
        return
    if not _same_gradient(old.get("identified"), new.get("identified")):
        yield Difference(f"gradient, {place}", _identified(old), _identified(new))
    for key, least in (("relative_bias", NO_BIAS), ("relative_variance", 0.0)):
        if key in old and not _same_number(old[key], new[key], least):
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
    assert isinstance(old, int | float)
    assert isinstance(new, int | float)
    return abs(old - new) <= max(least, ROUNDING * max(abs(old), abs(new)))


def is_number(value: object) -> bool:
    """True if a value of JSON is a finite number."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _number(value: object) -> str:
    return number(float(value) if isinstance(value, int | float) and is_number(value) else None)


def _words(value: object) -> str:
    return "none" if value is None else one_line(str(value))
