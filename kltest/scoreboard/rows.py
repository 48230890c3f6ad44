"""What is kept of a setting's grading: a row of plain data, the same for the same findings but for the seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kltest.adapters.adapter import Door, Setting

if TYPE_CHECKING:
    from kltest.report import Report
    from kltest.scoreboard.programs import Program

DIGITS = 6
"""Significant digits of numbers that are kept."""
COMPARED = ("verdict", "reduction", "dtype", "gradients", "value", "failed", "error")
"""What a new version of a library is compared with an old one by."""

PACKAGES = re.compile(r"/[^\s:'\"]*/(?:site|dist)-packages/")
Row = dict[str, Any]


def row(
    library: Door,
    setting: Setting,
    report: Report,
    program: Program,
    *,
    version: str,
    versions: Mapping[str, str],
    known: bool,
    seconds: float,
) -> Row:
    """One setting of one version: how it was called, what was found, and the program that shows it."""
    found = report.to_dict()
    gradients = [
        {key: each[key] for key in ("environment", "sampler", "batch", "identified", "relative_bias", "cosine")}
        | {"residual": each["residual"], "agrees": each["agrees"], "method": each["method"]}
        for each in found["gradients"]
    ]
    return _rounded(
        {
            "library": library.name,
            "version": version,
            "setting": setting.name,
            "target": setting.target,
            "arguments": dict(setting.arguments),
            "options": dict(setting.options),
            "depth": setting.depth,
            "default": setting.default,
            "recipe": setting.recipe,
            "known": known,
            "source": setting.source,
            "note": setting.note,
            "versions": dict(versions),
            "seconds": round(seconds, 1),
            "expect": report.expect,
            "placement": report.placement,
            "credit": report.credit,
            "verdict": report.verdict,
            "reduction": report.reduction,
            "dtype": report.dtype,
            "gradients": gradients,
            "value": [{key: each[key] for key in ("environment", "sampler", "matches")} for each in found["value"]],
            "failed": [{"code": check.code, "message": check.message} for check in report.failed],
            "open": [check.code for check in report.checks if check.status == "inconclusive"],
            "notes": list(report.notes),
            "error": report.error,
            "program": "" if program.of_door else program.code,
            "program_of_door": program.of_door,
            "program_note": program.note,
        }
    )


def absent(library: Door, version: str, reason: str) -> Row:
    """The row of a library that could not be installed or took its process down."""
    return {
        "library": library.name,
        "version": version,
        "setting": "",
        "verdict": "error",
        "error": reason,
        "gradients": [],
        "value": [],
        "failed": [],
    }


def key(each: Mapping[str, Any]) -> tuple[str, str, str]:
    """What names a row."""
    return each["library"], each["version"], each["setting"]


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each library, version and setting, in the order in which they first came."""
    return list({key(each): each for each in rows}.values())


def changes(old: Sequence[Row], new: Sequence[Row], only: Sequence[str] = ()) -> list[str]:
    """What is not as it was, a sentence each, by library and setting, whatever the version; none for new libraries.

    Of several old versions of a library the first counts. `only` are the settings that were asked for, if not all.
    """
    first: dict[str, str] = {}
    for each in old:
        first.setdefault(each["library"], each["version"])
    before = {(each["library"], each["setting"]): each for each in old if each["version"] == first[each["library"]]}
    after = {(each["library"], each["setting"]): each for each in new}
    told = []
    for name, each in after.items():
        title = f"{each['library']} {each['version']} {each['setting']}".rstrip()
        if name not in before:
            told += [f"{title}: new, {summary(each)}"] if each["library"] in first or not each["setting"] else []
            continue
        last = before[name]
        if differs := [part for part in COMPARED if _compared(last.get(part)) != _compared(each.get(part))]:
            told.append(
                f"{title}: {', '.join(differs)} changed since {last['version']}: {summary(last)} → {summary(each)}"
            )
    broken = {each["library"] for each in new if not each["setting"]}
    whole = {each["library"] for each in new} - broken
    gone = [
        each
        for name, each in before.items()
        if each["library"] in whole and name not in after and (not only or each["setting"] in only)
    ]
    return told + [
        f"{each['library']} {each['setting']}: no longer there (it was in {each['version']})" for each in gone
    ]


def summary(each: Mapping[str, Any]) -> str:
    """A row in a few words."""
    if each["error"]:
        return f"not graded: {each['error']}"
    found = "; ".join(
        f"{row['environment']}, {row['sampler']}: {named(row['identified'])}"
        for row in each["gradients"]
        if row["batch"] == 1 or row["identified"] is not None
    )
    codes = ", ".join(check["code"] for check in each["failed"])
    return found + (f" ({codes})" if codes else "")


def named(identified: Mapping[str, float] | None) -> str:
    """A combination as text that `--expect` takes."""
    from kltest.truth import plain

    return (
        "no named gradient"
        if identified is None
        else plain({name: float(f"{c:.3g}") for name, c in identified.items()})
    )


def _compared(value: Any) -> Any:
    """Numbers to three digits, so that rounding on another machine is no news; no messages, which hold numbers too."""
    if isinstance(value, float):
        return 0.0 if abs(value) < 1e-3 else float(f"{value:.3g}")
    if isinstance(value, Mapping):
        return {name: _compared(item) for name, item in value.items() if name not in ("message", "residual")}
    if isinstance(value, list):
        return [_compared(item) for item in value]
    return value


def _rounded(value: Any) -> Any:
    """Numbers to so many digits, and files by their path in their package, the same on every machine."""
    if isinstance(value, str):
        return PACKAGES.sub("", value)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
