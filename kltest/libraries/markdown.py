"""The scoreboard as Markdown, for reading where the code is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kltest.libraries.guide import INTRODUCTION, advice, names
from kltest.libraries.rows import Row
from kltest.libraries.scoreboard import COLUMNS, Line, lines
from kltest.reproduce.files import as_markdown

PROGRAMS = "reproductions"


def render(rows: Sequence[Row]) -> str:
    """The whole page."""
    found = lines(rows)
    parts = ["# Real libraries, graded", INTRODUCTION]
    parts.append("\n".join(f"- **{name}**: {meaning}." for name, meaning in names().items()))
    parts += ["## What to set", *_guide(found)]
    for title in dict.fromkeys(line.cells["library"] for line in found):
        parts += [f"## {title}", *_section([line for line in found if line.cells["library"] == title])]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _guide(found: Sequence[Line]) -> Iterator[str]:
    for each in advice(found):
        words = [f"**{each.library}**."]
        if each.defaults:
            names = ", ".join(f"`{line.setting}` ({line.cells['sequences']})" for line in each.defaults[:3])
            words.append(f"By default: {names}.")
        if each.settings:
            words.append(
                "Follows ∇KL(π‖ref) as it is: " + ", ".join(f"`{line.setting}`" for line in each.settings) + "."
            )
        for line in each.recipes:
            words.append(f"Recipe `{line.setting}`: {line.row['note'] or 'confirmed'}")
        if not (each.settings or each.recipes):
            words.append("No setting was found that follows it.")
        yield " ".join(words)


def _section(found: Sequence[Line]) -> Iterator[str]:
    failed = [line for line in found if not line.setting]
    for line in failed:
        yield f"Not measured: {line.row['error']}"
    rows = []
    for line in found:
        if not line.setting:
            continue
        mark = " **default**" if line.default else " *recipe*" if line.recipe else ""
        cells = {column: line.cells[column] for column in COLUMNS[2:]}
        shown = f"[program]({PROGRAMS}/{line.program})" if line.program else ""
        rows.append({"setting": f"`{line.setting}`{mark}", **cells, "without kltest": shown})
    if rows:
        yield as_markdown(rows)
    again = sorted({line.command.partition(" --setting")[0] for line in found})
    yield f"Again: `{again[0]}`, with `--setting NAME` for one row."
