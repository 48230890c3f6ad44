"""report.jsonl, a row a mutant, and report.md, their count by room."""

import json
import tomllib
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
Row = dict[str, object]


def read(path: Path = HERE / "report.jsonl") -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(rows: list[Row], path: Path = HERE / "report.jsonl") -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    path.with_suffix(".md").write_text(render(rows), encoding="utf-8")


def changed(row: Row) -> tuple[str, str]:
    """The line as it was and as the mutant has it."""
    lines = [line for line in str(row["diff"]).splitlines() if line[:3] not in ("---", "+++")]
    old, new = ("\n".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+")
    return old, new


def reasons() -> dict[tuple[str, str], str]:
    """Why a mutant may live, by its module and its line: `explained.toml`."""
    entries = tomllib.loads((HERE / "explained.toml").read_text(encoding="utf-8"))["mutant"]
    return {(entry["module"], entry["now"]): entry["why"] for entry in entries}


def state(row: Row, known: dict[tuple[str, str], str]) -> str:
    """noticed at once, noticed since, gone (its line has changed since), explained or unexplained."""
    if row["outcome"] == "killed":
        return "noticed at once"
    if row.get("again") in ("noticed since", "gone"):
        return str(row["again"])
    return "explained" if (str(row["module"]), changed(row)[1]) in known else "unexplained"


STATES = ("noticed at once", "noticed since", "gone", "explained", "unexplained")


def render(rows: list[Row]) -> str:
    """A table of what became of the mutants, by room."""
    known = reasons()
    rooms = sorted({room(row) for row in rows})
    counted = {place: Counter(state(row, known) for row in rows if room(row) == place) for place in rooms}
    whole = sum(counted.values(), Counter())
    lines = [
        "# Mutation testing",
        "",
        f"{len(rows)} mutants, each in another place: a seeded sample by cosmic-ray (`python tests/mutation/run.py`).",
        "`report.jsonl` has a row a mutant; `explained.toml` says why those that are not noticed may live.",
        "",
        f"| room | mutants | {' | '.join(STATES)} |",
        "| --- " * (len(STATES) + 2) + "|",
    ]
    for place, counts in [*((f"`{place}`", counted[place]) for place in rooms), ("together", whole)]:
        lines.append(f"| {place} | {counts.total()} | {' | '.join(str(counts[name]) for name in STATES)} |")
    return "\n".join(lines) + "\n"


def room(row: Row) -> str:
    """The folder that holds the mutated module."""
    return str(row["module"]).rpartition("/")[0]


if __name__ == "__main__":
    write(read())
