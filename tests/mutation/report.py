"""report.json, a row a mutant, and report.md, which people read: what the tests noticed, and why the rest may live."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
Row = dict[str, object]


def read(path: Path = HERE / "report.json") -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8"))


def write(rows: list[Row], path: Path = HERE / "report.json") -> None:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
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
    known = reasons()
    counts = {name: sum(state(row, known) == name for row in rows) for name in STATES}
    lines = [
        "# Mutation testing",
        "",
        f"{len(rows)} mutants of `kltest/grading` and `kltest/moments`, each in another place, a seeded sample made by "
        "cosmic-ray (`python tests/mutation/run.py`).",
        f"{counts['noticed at once']} were noticed by the tests as they stood, {counts['noticed since']} more by tests "
        f"that were written because of them (`again.py`), {counts['gone']} were in lines that have changed since. "
        f"{counts['explained']} may live, for the reason that stands beside them; {counts['unexplained']} are not "
        "explained.",
        "",
        "| module | mutants | " + " | ".join(STATES) + " |",
        "| --- " * (len(STATES) + 2) + "|",
    ]
    for module in sorted({str(row["module"]) for row in rows}):
        own = [row for row in rows if row["module"] == module]
        numbers = (sum(state(row, known) == name for row in own) for name in STATES)
        lines.append(f"| `{module}` | {len(own)} | " + " | ".join(str(number or "") for number in numbers) + " |")
    for title in ("unexplained", "explained"):
        chosen = [row for row in rows if state(row, known) == title]
        lines += ["", f"## Not noticed, {title}", ""] if chosen else []
        for row in chosen:
            old, new = changed(row)
            lines += [
                f"`{row['module']}`: {known.get((str(row['module']), new), 'no reason is known.')}",
                "",
                "```diff",
            ]
            lines += [*(f"- {line}" for line in old.splitlines()), *(f"+ {line}" for line in new.splitlines())]
            lines += ["```", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    write(read())
