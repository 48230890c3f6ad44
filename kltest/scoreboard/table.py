"""The scoreboard as data frames: a line for each library, version and setting, and one for each default."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame

from kltest.adapters import NAMES, find
from kltest.checks import CHECKS
from kltest.names import listed
from kltest.scoreboard.classes import (
    CLASSES,
    EQUAL_LENGTHS,
    NO_RATIO,
    class_of,
    finite_class,
    limit_class,
    limit_names,
    names_one_length_only,
    off_policy,
)
from kltest.scoreboard.rows import BATCH, GROUP, MARGIN, BoardRow, combination, factor, leaked, part_of

# Columns of the scoreboard and their headings.
COLUMNS = {
    "title": "library",
    "setting": "setting",
    "one_step": "one step",
    "sequences": "sequences",
    "off_policy": "off-policy",
    "checks": "checks",
    "logged": "logged KL",
    "measured": "measured",
}
# Columns of the table of defaults, and their headings.
SUMMARY = {
    "setting": "library, with its KL on",
    "follows": "on-policy",
    "stale": "off-policy",
    "instead": "for ∇KL(π‖ref)",
    "unset": "if nothing is set",
    "policy": "without its KL",
}
# Columns of `frame` that `defaults` has too.
KEPT = ("library", "version", "setting", "kind", "follows", "stale", "unset", "row")
# Settings that a cell of it names.
MOST = 3
OURS, FRESH = " (ours)", " (on-policy)"
# Tones of classes by their nearness to ∇KL(π‖ref) of whole sequences.
TONES = {"whole": "right", "on-policy": "near", "scaled": "near", "part": "near", "open": "open"}
# What grows, the largest size of it that is sampled, and a factor on a limit that differs between policies.
GROWING = {BATCH: "B grows", GROUP: "the group grows"}
LARGEST = 128
# Environments of rollouts of one length.
FIXED = ("bandit", "sequence")
VARIES = "const"
VALUES = {
    "kl": "KL",
    "kl_per_token": "KL per token",
    "mean_of_token_means": "mean of the rollouts' means",
    None: "none of the KL values",
}


def frame(rows: Sequence[BoardRow], *, programs: bool = True) -> DataFrame:
    """Return the rows as a table.

    Args:
        rows: rows as measuring writes them or as they are recorded.
        programs: write the standalone programs, which takes longer than all the rest.

    Returns:
        A data frame with the columns of `COLUMNS` in words, and with library, version, part, family, mark ("default",
        "recipe" or ""), kind (a key of `CLASSES`), exactly (that of enumerated batches), tone (how near it is),
        follows, stale and unset (as `defaults` has them), grows (what large batches come to), command (what measures
        the row again), program and file (the standalone program and its name, "" if there is none), row (the row
        itself).
    """
    return DataFrame([_line(each, programs) for each in rows])


def defaults(rows: Sequence[BoardRow]) -> DataFrame:
    """Return documented defaults, one a line.

    Args:
        rows: rows as measuring writes them or as they are recorded.

    Returns:
        A data frame with the columns library, version, setting; follows (the class of its gradient and the factor on
        it), stale, unset (what happens if nothing at all is set), policy (what its policy part ascends), each in words;
        kind (a key of `CLASSES`); row (the row itself); and instead, the lines of `frame` that follow ∇KL(π‖ref): those
        of the same family of settings (`grpo/…`), with the first default those of families without a default, and ours
        last.
    """
    found = []
    for _, group in frame(rows, programs=False).groupby("title", sort=False):
        policies = {line["setting"]: line["follows"] for line in group[group["part"] != "kl"].to_dict("records")}
        lines = group[(group["mark"] == "default") & (group["part"] == "kl")].to_dict("records")
        families = [line["family"] for line in lines]
        for number, line in enumerate(lines):
            right = following(group, off_policy=line["kind"] == "on-policy").to_dict("records")
            open_to = {line["family"]} if number else {line["family"], *(set(group["family"]) - set(families))}
            instead = [each for each in right if each["family"] in open_to]
            also = {"instead": instead, "policy": policies.get(line["setting"], "–")}
            found.append({**{name: line[name] for name in KEPT}, **also})
    return DataFrame(found)


def summary(rows: Sequence[BoardRow]) -> DataFrame:
    """Return the defaults as cells of a table in Markdown, a line each."""
    found = []
    for line in defaults(rows).to_dict("records"):
        instead = [_named({**each, "setting": f"`{each['setting']}`"}) for each in line["instead"]]
        shown = ", ".join(instead[:MOST]) + " …" * (len(instead) > MOST)
        cells = (f"{line['library']} {line['version']}<br>`{line['setting']}`", line["follows"], line["stale"])
        found.append(dict(zip(SUMMARY.values(), (*cells, shown or "–", line["unset"], line["policy"]), strict=True)))
    return DataFrame(found)


def following(table: DataFrame, *, off_policy: bool = False) -> DataFrame:
    """Return the lines that follow ∇KL(π‖ref), at least on-policy, or `off_policy` too; recipes last."""
    right = table[table["exactly"].isin(("whole",) if off_policy else ("whole", "on-policy"))]
    return right.sort_values("mark", key=lambda marks: marks == "recipe", kind="stable")


def right(table: DataFrame, none: str = "no setting") -> str:
    """Say in a sentence which lines of one library's table follow ∇KL(π‖ref); `none` names them if no line does."""
    if set(table["part"]) == {"policy"}:
        return "what is ascended with β = 0"
    lines = following(table).to_dict("records")
    if not lines:
        return f"{none} follows ∇KL(π‖ref)"
    return f"∇KL(π‖ref) is followed by {listed([_named(line) for line in lines])}"


def _named(line: Mapping[Any, Any]) -> str:
    return f"{line['setting']}{OURS * (line['mark'] == 'recipe')}{FRESH * (line['kind'] == 'on-policy')}"


def _line(each: BoardRow, programs: bool) -> dict[str, Any]:
    there = each["gradients"]
    program, name = _program(each) if programs else "", re.sub(r"[^\w.+=-]", "-", each["setting"])
    kind = class_of(each)
    one_step = f"not graded: {each['error']}" if each["error"] else _found(each, "current", ("bandit",))
    setting = f" --setting {shlex.quote(each['setting'])}" if each["setting"] else ""
    release = f"{each['library']}=={each['version']}"
    part = "" if part_of(each) == "kl" else f" --part {part_of(each)}"
    groups = f", groups of {each['options']['group_size']}" if part else ""
    return {
        "library": each["library"],
        "version": each["version"],
        "title": f"{each['library']} {each['version']}",
        "setting": each["setting"],
        "part": part_of(each),
        "mark": "default" if each.get("default") else "recipe" if each.get("recipe") else "",
        "family": each["setting"].partition("/")[0],
        "kind": kind,
        "exactly": finite_class(each),
        "tone": TONES.get(kind, "far"),
        "follows": _ascends(each) if part else _follows(each),
        "grows": as_batches_grow(each),
        "stale": off_policy(each),
        "unset": _unset(each),
        "one_step": one_step,
        "sequences": _found(each, "current", ("sequence", "ragged")),
        "off_policy": _off_policy(each),
        "checks": _codes(each),
        "logged": _logged(each),
        "measured": f"{each['depth']}, {each['dtype']}{groups}" if there else "",
        "leak": leaked(each["leak"]) if each.get("leak") else "",
        "command": f"kltest libraries {shlex.quote(release)}{part}{setting}",
        "program": program,
        "file": f"{each['library']}-{each['version']}-{name}.py" if program else "",
        "row": each,
    }


def _program(each: BoardRow) -> str:
    """The text of a row's standalone program, as it was stored or as the adapter writes it."""
    from kltest.scoreboard.programs import standalone

    known = find(each["library"]).known.get(each["setting"]) if each["library"] in NAMES else None
    if known is None or not each.get("program_of_adapter"):
        return each.get("program", "").strip()
    return standalone(find(each["library"]), known, (row["batch"] for row in each["gradients"]))


def _follows(each: BoardRow) -> str:
    """The class with its factor; of a loss that couples rows, that of large batches beside that of small ones."""
    words, grows = _in_small_batches(each), as_batches_grow(each)
    if not grows or each["limits"][0]["of"] != BATCH or limit_class(each) is None:
        return f"{words}; {grows}" if grows else words
    if limit_class(each) == finite_class(each):
        words = words.removeprefix(f"{_class_words(finite_class(each), '')}, ")
    return f"{grows}; at B = {_enumerated(each)}: {words}"


def _ascends(each: BoardRow) -> str:
    """The class of a policy part, its law or its factors at one token and at several, and the registered loss."""
    kind = finite_class(each)
    found = {row["environment"]: row["identified"] for row in _current(each) if row["environment"] in FIXED}
    words = _class_words(kind, "").replace("U_G", f"U_{each['options']['group_size']}")
    if any(len(terms or ()) > 1 for terms in found.values()):
        words += f": {_found(each, 'current', FIXED)}"
    elif kind in ("reward", "utility"):
        by = [factor(each, name, c, place) for place, terms in found.items() for name, c in terms.items()]
        if len(set(by)) > 1 and not each["laws"]:
            by = [f"{number or 1} for {tokens}" for number, tokens in zip(by, ("one token", "two"), strict=True)]
        words += "".join(f", × {number}" for number in dict.fromkeys(by) if number)
    words += f", {EQUAL_LENGTHS}" * names_one_length_only(each)
    return f"{words}; advantages of {each['ascends']}" if each["ascends"] else words


def _in_small_batches(each: BoardRow) -> str:
    """The class in enumerated batches, the factor on it where all rollouts have one length, and if lengths matter."""
    there = [row["identified"] for row in _current(each) if row["environment"] == "sequence"]
    found: Mapping = next(filter(None, there), {})
    by = factor(each, *next(iter(found.items()))) if len(found) == 1 and "zero" not in found else ""
    return _class_words(finite_class(each), by) + f", {EQUAL_LENGTHS}" * names_one_length_only(each)


def _class_words(kind: str, by: str) -> str:
    words = CLASSES[kind].words.removesuffix(", on- and off-policy").removesuffix(", on-policy only")
    return words + (f", × {by}" if by else "")


def as_batches_grow(each: BoardRow) -> str:
    """Say what the gradient comes to in large batches and how far it is off; "" if small ones say it, or if unknown."""
    limits = each.get("limits") or ()
    if not limits:
        return ""
    of, kind = limits[0]["of"], limit_class(each)
    if kind is None:
        named = all(one["terms"] is not None for one in limits)
        return f"still moving at {of} = {LARGEST}" if named else f"no nearer to a name at {of} = {LARGEST}"
    rate = max(one["rate"] for one in limits)
    if not rate and kind == finite_class(each) and not names_one_length_only(each):
        return ""
    off = f" (off by {rate:.2g}/{of})" if rate else ""
    return f"{_class_words(kind, limit_factor(limits))}, as {GROWING[of]}{off}"


def limit_factor(limits: Sequence[Mapping[str, Any]]) -> str:
    """The factor on a limit of one name: a number, one over the mean length, or that it differs between policies."""
    names = {name for one in limits for name in limit_names(one)}
    if len({*map(len, map(limit_names, limits))} | {1}) > 1:
        return ""
    ends = [
        (sum(ends) / 2, length)
        for one in limits
        for name in limit_names(one)
        for ends, length in zip(one["terms"][name], one["lengths"], strict=True)
    ]
    for words, scaled in (("{a}", [c for c, _ in ends]), ("{a}/E[T]", [c * length for c, length in ends])):
        mean = sum(scaled) / len(scaled)
        if len(names) <= len(limits) and all(abs(one - mean) <= MARGIN * abs(mean) for one in scaled):
            number = "1" if abs(mean - 1) <= MARGIN else f"{mean:.2g}"
            return "" if (words, number) == ("{a}", "1") else words.format(a=number)
    return VARIES


def _enumerated(each: BoardRow) -> int:
    """The largest batch that was enumerated in sequences."""
    there = [
        row["batch"] for row in each["gradients"] if row["sampler"] == "current" and row["environment"] != "bandit"
    ]
    return max([*there, 2])


def _unset(each: BoardRow) -> str:
    """Say what happens if nothing at all is set; a dash if that is not known."""
    if len(each.get("unset", ())) < 2:
        return "".join(each.get("unset", ())) or "–"
    name, value = each["unset"]
    return f"{'KL on' if value else 'no KL'}, {name} = {value}"


def _current(each: BoardRow) -> list[Mapping]:
    return [row for row in each["gradients"] if row["sampler"] == "current"]


def _off_policy(each: BoardRow) -> str:
    """The gradients under a stale sampler, and that no ratio corrects for it."""
    if not each["gradients"]:
        return ""
    found, words = _found(each, "stale", ("bandit", "sequence", "ragged")), off_policy(each)
    return f"{words}: {found}" if words == NO_RATIO else found or words


def _found(each: BoardRow, sampler: str, environments: Sequence[str]) -> str:
    """The gradients found: a single one if environments agree, else environment by environment."""
    found: dict[str, list[str]] = {}
    for environment in environments:
        there = [row for row in each["gradients"] if (row["environment"], row["sampler"]) == (environment, sampler)]
        # A batch of one shows what a rollout contributes; if rows are coupled there are larger batches only.
        for row in [row for row in there if row["batch"] == 1] or there[:1]:
            words = combination(each, row["identified"], environment, formula=True)
            found.setdefault(words, []).append(environment)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)}: {gradient}" for gradient, names in found.items())


def _codes(each: BoardRow) -> str:
    """The checks that failed; those that only warn behind them."""
    codes = [check["code"] for check in each["failed"]]
    failed = " ".join(code for code in codes if CHECKS[code].level == "error")
    warned = " ".join(code for code in codes if CHECKS[code].level == "warning")
    return failed + (f"{' · ' if failed else ''}warns: {warned}" if warned else "")


def _logged(each: BoardRow) -> str:
    found = [VALUES.get(row["matches"], row["matches"]) for row in each["value"] if row["sampler"] == "current"]
    return " / ".join(dict.fromkeys(found))
