"""report.jsonl, a row a mutant that lives or that another test noticed since, the numbers of the others by room, and
report.md, a table of them."""

import json
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
Row = dict[str, object]
# Gone: its line has changed since.
COUNTED = ("noticed at once", "noticed since", "gone")
STATES = (*COUNTED, "explained", "unexplained")


def read(path: Path = HERE / "report.jsonl") -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def write(rows: list[Row], path: Path = HERE / "report.jsonl") -> None:
    """Write both files; a mutant that was explained ("why") in the file before stays so."""
    known = {place(row): row["why"] for row in read(path) if "why" in row}
    shown = [row for row in rows if "by" in row or state(row) in STATES[len(COUNTED) :]]
    kept = [row | ({"why": known[place(row)]} if "by" not in row and place(row) in known else {}) for row in shown]
    others = by_room([row for row in rows if row not in shown])
    counts = {name: {each: found[each] for each in COUNTED if found[each]} for name, found in others.items()}
    kept += [{"room": name, **numbers} for name, numbers in counts.items()]
    kept.sort(key=lambda row: (room(row), str(row.get("module", "")), row.get("line", 0)))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    path.with_suffix(".md").write_text(render(kept), encoding="utf-8")


def place(row: Row) -> tuple[str, str]:
    """The module, and the line as the mutant has it."""
    new = (line[1:].strip() for line in str(row["diff"]).splitlines() if line[:1] == "+" and line[:3] != "+++")
    return str(row["module"]), "\n".join(new)


def room(row: Row) -> str:
    return str(row["room"]) if "room" in row else str(row["module"]).rpartition("/")[0]


def state(row: Row) -> str:
    """One of STATES; "again" is what a later look found, and "by" the test that did. A row of numbers has none."""
    if "room" in row:
        return ""
    if row["outcome"] == "killed":
        return "noticed at once"
    return str(row.get("again") or ("explained" if "why" in row else "unexplained"))


def by_room(rows: list[Row]) -> dict[str, Counter[str]]:
    counted: dict[str, Counter[str]] = {}
    for row in rows:
        numbers = {each: int(str(row.get(each, 0))) for each in COUNTED} if "room" in row else {state(row): 1}
        counted.setdefault(room(row), Counter()).update(numbers)
    return dict(sorted(counted.items()))


def render(rows: list[Row]) -> str:
    """A table of what became of the mutants, by room."""
    counted = by_room(rows)
    whole = sum(counted.values(), Counter())
    lines = [
        "# Mutation testing",
        "",
        f"{whole.total()} mutants, each in another place: a sample by cosmic-ray (`python tests/mutation/run.py`).",
        "At once: by tests of a push. Since: by one that runs weekly or was written for it (`by` in the row).",
        "`report.jsonl` has a row for each of these and for each that lives, and says why it may.",
        "",
        f"| room | mutants | {' | '.join(STATES)} |",
        "| --- " * (len(STATES) + 2) + "|",
    ]
    for name, counts in [*((f"`{each}`", found) for each, found in counted.items()), ("together", whole)]:
        lines.append(f"| {name} | {counts.total()} | {' | '.join(str(counts[each]) for each in STATES)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write(read())
