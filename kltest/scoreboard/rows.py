"""Rows: the results of grading one setting, as plain data. The same findings give the same row but for `seconds`."""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kltest.adapters import Adapter, Setting
from kltest.files import mapped

if TYPE_CHECKING:
    from kltest.report import Report

# Significant digits of stored numbers.
DIGITS = 6
GRADIENT = ("environment", "sampler", "batch", "identified", "relative_bias", "cosine", "residual", "agrees", "method")
VALUE = ("environment", "sampler", "matches")
LIMIT = ("environment", "of", "terms", "rate", "lengths", "exact", "sampled", "beside_reward")
# Fields of a setting that a row repeats.
DESCRIBED = ("target", "arguments", "options", "depth", "default", "recipe", "source", "note", "ascends")
# Parts of a loss that have rows: its KL term, and what advantage, ratio and normalisation follow without it.
PARTS = ("kl", "policy")
# Fields of a report that a row repeats.
REPORTED = ("expect", "placement", "credit", "verdict", "reduction", "dtype", "unfinished")
# Fields in which two versions of a library are compared.
COMPARED = ("verdict", "reduction", "dtype", "gradients", "value", "failed", "error", "program_of_adapter", "unset")
# Fields of the scoreboard's own measurements: by name the laws of coefficients; limits as batches grow, as
# kltest.scoreboard.limits returns them; True if the sampler's log-probs move the gradient; name and default of the KL
# term's coefficient; what came through padding (KL501): which numbers stood there, what the loss gave then, and before.
LOOKED_AT: Mapping[str, Any] = {"laws": {}, "limits": [], "reads_sampler": False, "unset": [], "leak": []}
# What laws and limits call the rows of a batch, and those of a group if groups do not touch each other.
BATCH, GROUP = "B", "group size"
# Largest share of the gradient of the largest batches that a limit may leave.
MARGIN = 0.05
# If both are in a limit, the whole loss shows whether the reward and the KL keep their proportion, up to this share.
PROPORTION = 0.1
REWARDED = ("reverse_kl", "expected_reward")
WRITTEN = (
    "other log-probs and token ids",
    "0 for the policy and −50 for the others",
    "−50 for the policy and 0 for the others",
)
LEAKED = "KL501"
LEAKS = re.compile(r"With (.+) at padded positions, .+ is (\S+) (?:where it was|and not) (\S+)\.$")

PACKAGES = re.compile(r"/[^\s:'\"]*/(?:site|dist)-packages/")
BoardRow = dict[str, Any]


def described(setting: Setting) -> BoardRow:
    """Return the call of a setting and the library's own words on it, as JSON knows them."""
    return {key: mapped(getattr(setting, key), _rounded) for key in DESCRIBED}


def row(library: Adapter, setting: Setting, report: "Report", **others: Any) -> BoardRow:
    """Return the row of one setting: its call, what was found, and `others` (version, time, program) as they are."""
    found = report.to_dict()
    return mapped(
        {
            "library": library.name,
            "setting": setting.name,
            **described(setting),
            **{name: found[name] for name in REPORTED},
            "gradients": [{key: each[key] for key in GRADIENT} for each in _whole_groups(found["gradients"], others)],
            "value": [{key: each[key] for key in VALUE} for each in found["value"]],
            "failed": [{"code": check.code, "message": check.message} for check in report.failed],
            "inconclusive": [check.code for check in report.checks if check.status == "inconclusive"],
            "notes": list(report.notes),
            "error": report.error,
            **LOOKED_AT,
            "leak": _leak(report),
            **others,
        },
        _rounded,
    )


def part_of(each: Mapping[str, Any]) -> str:
    """Return the part of the loss that a row is about, one of PARTS."""
    return each.get("part", "kl")


def _whole_groups(gradients: Sequence[BoardRow], about: Mapping[str, Any]) -> list[BoardRow]:
    """Gradients of a row; of a policy part those of whole groups, the largest batches of an environment."""
    largest = {each["environment"]: each["batch"] for each in sorted(gradients, key=lambda one: one["batch"])}
    return [each for each in gradients if part_of(about) == "kl" or each["batch"] == largest[each["environment"]]]


def _leak(report: "Report") -> list[int | float]:
    """Numbers in what KL501 says; [] if it passed, or if what came through is no number."""
    found = LEAKS.search("".join(check.message for check in report.failed if check.code == LEAKED))
    if found is None or not all(math.isfinite(float(part)) for part in found.groups()[1:]):
        return []
    return [WRITTEN.index(found[1]), float(found[2]), float(found[3])]


def leaked(leak: Sequence[float]) -> str:
    """Return the sentence of such numbers."""
    written, after, before = leak
    return f"With {WRITTEN[int(written)]} at padded positions, the loss gives {after:.4g} where it gave {before:.4g}."


def graded(each: Mapping[str, Any]) -> bool:
    """Return True if a setting was graded to the end."""
    return not (each["error"] or each.get("unfinished"))


def absent(library: Adapter, version: str, reason: str) -> BoardRow:
    """Return the row of a library that could not be installed or took its process down."""
    about = {"library": library.name, "version": version, "setting": "", "verdict": "error", "error": reason}
    return {**about, "gradients": [], "value": [], "failed": []}


def matches(setting: str, patterns: Sequence[str]) -> bool:
    """Return True if a setting's name is one of the patterns or fits one, such as `grpo/*`, or if there are none."""
    return not patterns or any(setting == pattern or fnmatchcase(setting, pattern) for pattern in patterns)


def changes(old: Sequence[BoardRow], new: Sequence[BoardRow], only: Sequence[str] = ()) -> list[str]:
    """Return the differences between rows of two versions, a sentence each; none for libraries that `old` lacks.

    Rows are compared by library and setting. If `old` has several versions of a library, the first one counts.

    Args:
        old: the rows to compare with.
        new: the rows that were just measured.
        only: patterns of the settings that were measured, if not all.
    """
    newest = {each["library"]: each["version"] for each in reversed(old)}
    left = {(each["library"], each["setting"]): each for each in old if each["version"] == newest[each["library"]]}
    found = []
    for each in new:
        title = f"{each['library']} {each['version']} {each['setting']}".rstrip()
        last = left.pop((each["library"], each["setting"]), None)
        if last is None and (each["library"] in newest or not each["setting"]):
            found.append(f"{title}: new, {summary(each)}")
        differs = [part for part in COMPARED if last and _compared(last.get(part)) != _compared(each.get(part))]
        if last and differs:
            found.append(
                f"{title}: {', '.join(differs)} changed since {last['version']}: {summary(last)} → {summary(each)}"
            )
    whole = {each["library"] for each in new} - {each["library"] for each in new if not each["setting"]}
    gone = [each for each in left.values() if each["library"] in whole and matches(each["setting"], only)]
    return found + [
        f"{each['library']} {each['setting']}: no longer there (it was in {each['version']})" for each in gone
    ]


def summary(each: Mapping[str, Any]) -> str:
    """Return a row in a few words: environments with the gradients found there, and the codes of failed checks."""
    if each["error"]:
        return f"not graded: {each['error']}"
    found = "; ".join(
        f"{row['environment']}, {row['sampler']}: {combination(each, row['identified'], row['environment'])}"
        for row in each["gradients"]
        if row["batch"] == 1 or row["identified"] is not None
    )
    codes = ", ".join(check["code"] for check in each["failed"])
    return found + (f" ({codes})" if codes else "")


def factor(each: Mapping[str, Any], name: str, coefficient: float, environment: str = "sequence") -> str:
    """Return a coefficient as its law, or as a number; "" for one. On a bandit, a name is its next-token part too."""
    number = f"{coefficient:.4g}"
    if number == "1":
        return ""
    laws = each.get("laws", {})
    law = laws.get(name) or (laws.get(f"local_{name}") if environment == "bandit" else None)
    return (law or number).removeprefix("-")


def of_batches(each: Mapping[str, Any], name: str) -> bool:
    """Return True if the law of a coefficient is one of batches of every size."""
    return any(rows in each.get("laws", {}).get(name, "") for rows in (BATCH, GROUP))


def combination(
    each: Mapping[str, Any], identified: Mapping[str, float] | None, environment: str, *, formula: bool = False
) -> str:
    """Return a combination as text that `--expect` takes, or as a formula; a coefficient that follows a law is that."""
    from kltest.truth import plain, render

    if identified is None:
        return "unnamed"
    write, times, digits = (render, "·", 4) if formula else (plain, "*", 3)
    rounded = {name: float(f"{c:.{digits}g}") for name, c in identified.items()}
    words = write(rounded)
    for name, c in rounded.items():
        if by := factor(each, name, abs(c), environment):
            words = words.replace(write({name: abs(c)}), f"{by}{times}{write({name: 1.0})}")
    return words


def _compared(value: Any) -> Any:
    """Numbers to three digits, so that another machine's rounding is no change; no messages: they hold numbers too."""

    def rounded(one: Any) -> Any:
        return (0.0 if abs(one) < 1e-3 else float(f"{one:.3g}")) if isinstance(one, float) else one

    return mapped(value, rounded, without=("message", "residual"))


def _rounded(value: Any) -> Any:
    """Round numbers, and shorten paths of files to start at their package: the same on every machine."""
    if isinstance(value, str):
        return PACKAGES.sub("", value)
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
