"""The scoreboard as a data frame, a row for each library, version and setting, and its two pages."""

import base64
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from pandas import DataFrame

from kltest.adapters import DEPTHS, NAMES, Setting, find
from kltest.checks import CHECKS
from kltest.render.html import STYLE
from kltest.render.markdown import escape
from kltest.render.words import one_line
from kltest.scoreboard.rows import Row
from kltest.truth import render

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
# Relation of a setting's gradient to ∇KL(π‖ref).
KINDS = {
    "reverse": "follows ∇KL(π‖ref)",
    "part": "its next-token part, or another size",
    "other": "another gradient",
    "open": "inconclusive",
}
VALUES = {
    "kl": "KL",
    "kl_per_token": "KL per token",
    "mean_of_token_means": "mean of the rollouts' means",
    None: "none of the KL values",
}


def frame(rows: Sequence[Row]) -> DataFrame:
    """Return the rows as a table.

    Args:
        rows: rows as measuring writes them or as they are recorded.

    Returns:
        A data frame with the columns of `COLUMNS` in words, and with library, version, mark ("default", "recipe" or
        ""), kind (a key of `KINDS`), where (whose rollouts were measured), command (what measures the row again),
        program and file (the standalone program and its name, "" if there is none), row (the row itself).
    """
    return DataFrame([_line(each) for each in rows])


def defaults(rows: Sequence[Row]) -> DataFrame:
    """Return documented defaults: what each follows, and settings of its library that follow ∇KL(π‖ref)."""
    found = []
    for title, group in frame(rows).groupby("title", sort=False):
        right = [f"`{setting}`" for setting in following(group)["setting"]]
        shown = ", ".join(right[:3]) + (" …" if len(right) > 3 else "") or "–"
        lines = group[group["mark"] == "default"]
        for number, line in enumerate(lines.itertuples(), 1):
            cells = {COLUMNS[name]: getattr(line, name) or "–" for name in ("one_step", "sequences", "off_policy")}
            last = shown if number == len(lines) else "–"
            found.append({"library": title, "by default": f"`{line.setting}`", **cells, KINDS["reverse"]: last})
    return DataFrame(found)


def following(table: DataFrame) -> DataFrame:
    """The lines that follow ∇KL(π‖ref), recipes last."""
    right = table[table["kind"] == "reverse"]
    return right.sort_values("mark", key=lambda marks: marks == "recipe", kind="stable")


def kind(each: Row) -> str:
    """Return how a row stands to ∇KL(π‖ref), a key of `KINDS`.

    `reverse`: ∇KL(π‖ref) with coefficient one in every environment; `part`: its next-token part, or another
    coefficient; `other`: another gradient; `open`: no verdict.
    """
    if each["verdict"] == "confirmed" and each["expect"] == "reverse_kl":
        return "reverse"
    if each["verdict"] in ("error", "inconclusive") or not each["gradients"]:
        return "open"
    current = [row for row in each["gradients"] if row["sampler"] == "current"]
    # If lengths differ, a part of it that is divided by them is unnamed.
    rows = [row["identified"] for row in current if row["identified"] or row["environment"] != "ragged"]
    near = all(found and set(found) <= {"reverse_kl", "local_reverse_kl"} for found in rows)
    return "part" if rows and near and all(min(found.values()) > 0 for found in rows) else "other"


def _line(each: Row) -> dict[str, Any]:
    there = each["gradients"]
    program, name = _program(each), re.sub(r"[^\w.+=-]", "-", each["setting"])
    stale = any(row["sampler"] == "stale" for row in there)
    one_step = f"not graded: {each['error']}" if each["error"] else _found(there, "current", ("bandit",))
    sequences = _found(there, "current", ("sequence", "ragged"))
    setting = f" --setting {shlex.quote(each['setting'])}" if each["setting"] else ""
    return {
        "library": each["library"],
        "version": each["version"],
        "title": f"{each['library']} {each['version']}",
        "setting": each["setting"],
        "mark": "default" if each.get("default") else "recipe" if each.get("recipe") else "",
        "kind": kind(each),
        "where": "on- and off-policy" if stale else "on-policy",
        "in_short": sequences or one_step,
        "one_step": one_step,
        "sequences": sequences,
        "off_policy": _found(there, "stale", ("bandit", "sequence", "ragged")),
        "checks": _codes(each),
        "logged": _logged(each),
        "measured": f"{DEPTHS[each['depth']]}, {each['dtype']}" if there else "",
        "command": f"kltest libraries {each['library']}=={each['version']}{setting}",
        "program": program,
        "file": f"{each['library']}-{each['version']}-{name}.py" if program else "",
        "row": each,
    }


def _program(each: Row) -> str:
    """The text of a row's standalone program, as it was kept or as the adapter writes it."""
    library = find(each["library"]) if each.get("program_of_adapter") and each["library"] in NAMES else None
    if library is None or library.standalone is None:
        return each.get("program", "").strip()
    fields = ("target", "arguments", "options", "depth", "default", "recipe")
    return library.standalone(Setting(each["setting"], **{name: each[name] for name in fields})).strip()


def _found(rows: Sequence[Mapping], sampler: str, environments: Sequence[str]) -> str:
    """The gradients found: a single one if environments agree, else environment by environment."""
    found: dict[str, list[str]] = {}
    for environment in environments:
        there = [row for row in rows if (row["environment"], row["sampler"]) == (environment, sampler)]
        # A batch of one shows what a rollout contributes; if rows are coupled there are larger batches only.
        for row in [row for row in there if row["batch"] == 1] or there[:1]:
            found.setdefault(_gradient(row["identified"]), []).append(environment)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)}: {gradient}" for gradient, names in found.items())


def _gradient(identified: Mapping[str, float] | None) -> str:
    return "unnamed" if identified is None else render({name: float(f"{c:.4g}") for name, c in identified.items()})


def _codes(each: Row) -> str:
    """The checks that failed; those that only warn behind them."""
    codes = [check["code"] for check in each["failed"]]
    failed = " ".join(code for code in codes if CHECKS[code].level == "error")
    warned = " ".join(code for code in codes if CHECKS[code].level == "warning")
    return failed + (f"{' · ' if failed else ''}warns: {warned}" if warned else "")


def _logged(each: Row) -> str:
    found = [VALUES.get(row["matches"], row["matches"]) for row in each["value"] if row["sampler"] == "current"]
    return " / ".join(dict.fromkeys(found))


FOLDER = Path(__file__).parent / "templates"
PROGRAMS = "programs"
# Programs of up to so many characters are shown on the page itself.
SHORT = 4_000


def files(rows: Sequence[Row]) -> dict[str, str]:
    """Return the files of the scoreboard by their path below one folder.

    Args:
        rows: rows as measuring writes them, or `kltest.scoreboard.recorded.read()`.

    Returns:
        `libraries.md`, `libraries.html` (self-contained) and the programs `programs/*.py` that both link to.
    """
    table = frame(rows)
    files, texts = table["file"], table["program"]
    programs = {f"{PROGRAMS}/{file}": text + "\n" for file, text in zip(files, texts, strict=True) if file}
    return {"libraries.md": markdown(table), "libraries.html": html(table), **programs}


def markdown(table: DataFrame) -> str:
    """Return the scoreboard, as `table.frame` gives it, in Markdown."""
    return _rendered("libraries.md.j2", table)


def html(table: DataFrame) -> str:
    """Return the scoreboard as one page: nothing is loaded from elsewhere, and only its own script may run."""
    script = (FOLDER / "script.js.j2").read_text(encoding="utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return _rendered("libraries.html.j2", table, script=script, digest=digest, base_style=STYLE)


def _rendered(name: str, table: DataFrame, **values: Any) -> str:
    loader, escaped = PackageLoader("kltest.scoreboard"), select_autoescape(["html.j2"])
    made = Environment(loader=loader, autoescape=escaped, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"md": lambda text: escape(one_line(text)), "gradient": lambda name: render({name: 1.0})}
    return made.get_template(name).render(
        columns=COLUMNS,
        kinds=KINDS,
        table=table,
        libraries=list(table.groupby("title", sort=False)),
        pairs=[(name, name) for name in table["library"].unique()],
        following=following,
        # For rows of which no message was kept.
        findings={code: check.title for code, check in CHECKS.items()},
        programs=PROGRAMS,
        short=SHORT,
        **values,
    )
