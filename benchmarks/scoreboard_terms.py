"""Compare the terms that `kltest scan` lists in libraries' trees with the settings that the scoreboard grades.

    python -m benchmarks.scoreboard_terms FOLDER

FOLDER holds the checkouts of `tests/scan/repositories.csv`, each in OWNER+NAME. `scoreboard_terms.csv` says which term
of the tree a setting grades (`file`, `function`, `place`, `variant`), and `why` none, or another one with stale
rollouts; the other columns are written here. Gradients are compared up to a positive factor: a scan grades the term
alone, a setting what the loss divides it by as well.
"""

import re
from pathlib import Path
from typing import Any

import pandas
import typer

import kltest
from benchmarks.measure import record
from kltest.scanning.judge import MOVING, _followed
from kltest.scoreboard import recorded

TABLE = Path(__file__).with_suffix(".csv")
REPOSITORIES = {
    "trl": "huggingface+trl",
    "openrlhf": "OpenRLHF+OpenRLHF",
    "torchtune": "pytorch+torchtune",
    "slime": "THUDM+slime",
}
SAMPLERS = ("current", "stale")


def plain(followed: str) -> str:
    """Return a gradient without what says that its size moves, and a single name without a positive factor."""
    followed = followed.split(" (")[0]
    return followed if " " in followed else re.sub(r"^(-?)[\d.e-]+\*", r"\1", followed)


def graded(row: dict[str, Any], sampler: str) -> str:
    """Return what a row of the scoreboard follows, said as the scan says it."""
    moving = [check["code"] for check in row["failed"] if check["code"] in MOVING]
    # Lengths are no difference: what a mean over each rollout's own tokens leaves of a score is none of the term's.
    rows = [
        each
        for each in row["gradients"]
        if each["sampler"] == sampler and not any("inverse_length" in name for name in each["identified"] or {})
    ]
    return plain(_followed(rows, moving)) if rows else ""


def result(row: dict[str, str]) -> str:
    """Say whether a setting and its term follow the same."""
    same = [row[f"graded_{sampler}"] in (row[f"listed_{sampler}"], "") for sampler in SAMPLERS]
    if row["line"] and all(same):
        return "same"
    if row["why"] and (same[0] or not row["line"]):
        return "same on-policy" if row["line"] else "not listed"
    return "differs"


def compared(row: dict[str, str], terms: list[dict[str, Any]], setting: dict[str, Any]) -> dict[str, str]:
    """Fill in what the scan and the scoreboard say of a setting."""
    names = ("function", "place", "variant")
    known = [each for each in terms if row["file"] in each["file"] and all(each[name] == row[name] for name in names)]
    found = known[0] if known else {"line": "", "gradients": {}}
    for sampler in SAMPLERS:
        row[f"graded_{sampler}"] = graded(setting, sampler)
        row[f"listed_{sampler}"] = plain(found["gradients"].get(sampler, ""))
    row["line"] = str(found["line"])
    return {**row, "result": result(row)}


def main(folder: Path) -> None:
    """Write the table."""
    settings = {(each["library"], each["setting"]): each for each in reversed(recorded.read())}
    scans = {library: kltest.scan(folder.resolve() / name).to_dict() for library, name in REPOSITORIES.items()}
    rows = pandas.read_csv(TABLE, dtype=str, keep_default_na=False).to_dict("records")
    rows = [compared(row, scans[row["library"]]["terms"], settings[row["library"], row["setting"]]) for row in rows]
    record(TABLE, pandas.DataFrame(rows))


if __name__ == "__main__":
    typer.run(main)
