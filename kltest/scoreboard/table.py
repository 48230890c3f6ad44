"""The words of the scoreboard: a line of cells for each library, version and setting, once for all formats."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kltest.adapters import door
from kltest.adapters.adapter import DEPTHS
from kltest.scoreboard.rows import Row
from kltest.truth import render

COLUMNS = ("library", "setting", "one step", "sequences", "off-policy", "checks", "logged KL", "measured")
NONE = "no named gradient"
WARNINGS = "KL8"
VALUES = {
    "kl": "KL",
    "kl_per_token": "KL per token",
    "mean_of_token_means": "mean of the rollouts' means",
    None: "none of the KL values",
}
ORDER = {"reverse": 0, "part": 1, "other": 2, "open": 3}


@dataclass(frozen=True)
class Line:
    """A row in words, by column; `kind` says how its gradient stands to ∇KL(π‖ref), for people who look for that."""

    library: str
    version: str
    setting: str
    default: bool
    recipe: bool
    cells: Mapping[str, str]
    kind: str
    command: str
    program: str
    row: Row

    @property
    def where(self) -> str:
        """Whose rollouts it was measured with."""
        stale = any(row["sampler"] == "stale" for row in self.row["gradients"])
        return "on- and off-policy" if stale else "on-policy"

    @property
    def in_short(self) -> str:
        """What it follows on sequences, or that this is not known."""
        return self.cells["sequences"] or self.cells["one step"]

    @property
    def file(self) -> str:
        """What the program is called, empty if there is none."""
        return f"{self.library}-{self.version}-{slug(self.setting)}.py" if self.program else ""


def lines(rows: Sequence[Row]) -> list[Line]:
    """A line for each row."""
    return [line(each) for each in rows]


def line(each: Row) -> Line:
    """One row in words."""
    there = each["gradients"]
    found = {
        "library": f"{each['library']} {each['version']}",
        "setting": each["setting"],
        "one step": _worlds(there, "current", ("bandit",)),
        "sequences": _worlds(there, "current", ("sequence", "ragged")),
        "off-policy": _worlds(there, "stale", ("bandit", "sequence", "ragged")),
        "checks": _codes(each),
        "logged KL": _logged(each),
        "measured": f"{DEPTHS[each['depth']]}, {each['dtype']}" if there else "",
    }
    if each["error"]:
        found["one step"] = f"not graded: {each['error']}"
    return Line(
        each["library"],
        each["version"],
        each["setting"],
        bool(each.get("default")),
        bool(each.get("recipe")),
        found,
        kind(each),
        command(each),
        _program(each),
        each,
    )


def kind(each: Row) -> str:
    """`reverse`: ∇KL(π‖ref) with coefficient one, wherever it was measured; `part`: its next-token part, or another
    coefficient; `other`: another gradient; `open`: not to be said.
    """
    if each["verdict"] == "confirmed" and each["expect"] == "reverse_kl":
        return "reverse"
    if each["verdict"] in ("error", "inconclusive") or not each["gradients"]:
        return "open"
    current = [row for row in each["gradients"] if row["sampler"] == "current"]
    # A part of it that is divided by lengths has no name where these differ.
    rows = [row["identified"] for row in current if row["identified"] or row["environment"] != "ragged"]
    near = all(found and set(found) <= {"reverse_kl", "local_reverse_kl"} for found in rows)
    return "part" if rows and near and all(min(found.values()) > 0 for found in rows) else "other"


def command(each: Row) -> str:
    """What shows this row again, on a machine that has nothing but kltest."""
    setting = f" --setting {shlex.quote(each['setting'])}" if each["setting"] else ""
    return f"kltest libraries {each['library']}=={each['version']}{setting}"


def _program(each: Row) -> str:
    """The text of the program that shows a row without kltest, as it was kept or as the door writes it."""
    if not each.get("program_of_door"):
        return each.get("program", "").strip()
    library = door(each["library"])
    setting = library.setting(each["setting"])
    return library.reproduction(setting).strip() if library.reproduction and setting else ""


def slug(name: str) -> str:
    """A setting's name as part of a file's."""
    return "".join(character if character.isalnum() or character in "._-+=" else "-" for character in name)


def _worlds(rows: Sequence[Mapping], sampler: str, worlds: Sequence[str]) -> str:
    """What was found in some worlds: once where it is the same, else world by world."""
    found: dict[str, list[str]] = {}
    for world in worlds:
        there = [row for row in rows if (row["environment"], row["sampler"]) == (world, sampler)]
        # A batch of one says what a rollout contributes; where rows are coupled only the batch has a meaning.
        for row in [row for row in there if row["batch"] == 1] or there[:1]:
            found.setdefault(_gradient(row["identified"]), []).append(world)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)}: {gradient}" for gradient, names in found.items())


def _gradient(identified: Mapping[str, float] | None) -> str:
    return NONE if identified is None else render({name: float(f"{c:.4g}") for name, c in identified.items()})


def _codes(each: Row) -> str:
    """The checks that failed; those that only warn behind them."""
    codes = [check["code"] for check in each["failed"]]
    failed = " ".join(code for code in codes if not code.startswith(WARNINGS))
    warned = " ".join(code for code in codes if code.startswith(WARNINGS))
    return failed + (f"{' · ' if failed else ''}warns: {warned}" if warned else "")


def _logged(each: Row) -> str:
    found = [VALUES.get(row["matches"], row["matches"]) for row in each["value"] if row["sampler"] == "current"]
    return " / ".join(dict.fromkeys(found))
