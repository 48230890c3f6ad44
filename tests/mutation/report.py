"""report.jsonl, a row a mutant that was not noticed at once and a count of the others, and report.md, by room."""

import json
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
Row = dict[str, object]


def read(path: Path = HERE / "report.jsonl") -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def write(rows: list[Row], path: Path = HERE / "report.jsonl") -> None:
    """Write both files; a mutant that was explained ("why") in the file before stays so."""
    known = {place(row): row["why"] for row in read(path) if "why" in row}
    lived = [row for row in rows if row["outcome"] != "killed"]
    killed = Counter(str(row["module"]) for row in rows for _ in range(mutants(row)) if row["outcome"] == "killed")
    kept = [row | ({"why": known[place(row)]} if place(row) in known else {}) for row in lived]
    kept += [{"module": module, "outcome": "killed", "mutants": number} for module, number in killed.items()]
    kept.sort(key=lambda row: (row["module"], row.get("line", 0)))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    path.with_suffix(".md").write_text(render(kept), encoding="utf-8")


def place(row: Row) -> tuple[str, str]:
    """The module, and the line as the mutant has it."""
    new = (line[1:].strip() for line in str(row["diff"]).splitlines() if line[:1] == "+" and line[:3] != "+++")
    return str(row["module"]), "\n".join(new)


def mutants(row: Row) -> int:
    return int(str(row.get("mutants", 1)))


def state(row: Row) -> str:
    """noticed at once, noticed since, gone (its line has changed since), explained or unexplained."""
    if row["outcome"] == "killed":
        return "noticed at once"
    return str(row.get("again") or ("explained" if "why" in row else "unexplained"))


STATES = ("noticed at once", "noticed since", "gone", "explained", "unexplained")


def render(rows: list[Row]) -> str:
    """A table of what became of the mutants, by room."""
    counted: dict[str, Counter[str]] = {}
    for row in rows:
        counted.setdefault(str(row["module"]).rpartition("/")[0], Counter())[state(row)] += mutants(row)
    whole = sum(counted.values(), Counter())
    lines = [
        "# Mutation testing",
        "",
        f"{whole.total()} mutants, each in another place: a sample by cosmic-ray (`python tests/mutation/run.py`).",
        "`report.jsonl` has a row for each that was not noticed at once, and says why those that never are may live.",
        "",
        f"| room | mutants | {' | '.join(STATES)} |",
        "| --- " * (len(STATES) + 2) + "|",
    ]
    for name, counts in [*((f"`{room}`", counted[room]) for room in sorted(counted)), ("together", whole)]:
        lines.append(f"| {name} | {counts.total()} | {' | '.join(str(counts[each]) for each in STATES)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write(read())
