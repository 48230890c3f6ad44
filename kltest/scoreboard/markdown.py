"""The scoreboard as Markdown, for reading where the code is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kltest.render.markdown import escape
from kltest.render.words import one_line
from kltest.scoreboard.guide import INTRODUCTION, advice, names
from kltest.scoreboard.rows import Row
from kltest.scoreboard.table import COLUMNS, Line, lines
from kltest.truth import render as written

PROGRAMS = "reproductions"
TRUE = written({"reverse_kl": 1.0})


def render(rows: Sequence[Row]) -> str:
    """The whole page."""
    found = lines(rows)
    parts = ["# Real libraries, graded", INTRODUCTION]
    parts.append("\n".join(f"- **{escape(name)}**: {meaning}." for name, meaning in names().items()))
    parts += ["## What to set", *_guide(found)]
    for title in dict.fromkeys(line.cells["library"] for line in found):
        parts += [f"## {title}", *_section([line for line in found if line.cells["library"] == title])]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _guide(found: Sequence[Line]) -> Iterator[str]:
    for each in advice(found):
        words = [f"**{each.library}**."]
        if each.defaults:
            names = ", ".join(f"`{line.setting}` ({escape(one_line(line.in_short))})" for line in each.defaults[:3])
            words.append(f"By default: {names}.")
        if each.settings:
            names = ", ".join(f"`{line.setting}` ({line.where})" for line in each.settings)
            words.append(f"Follows {escape(TRUE)} as it is: {names}.")
        words += [f"Recipe `{line.setting}` ({line.where}): {escape(line.row['note'])}" for line in each.recipes]
        if not (each.settings or each.recipes):
            words.append("No setting was found that follows it.")
        yield " ".join(words)


def _section(found: Sequence[Line]) -> Iterator[str]:
    measured = [line for line in found if line.setting]
    yield from (f"Not measured: {escape(one_line(line.row['error']))}" for line in found if not line.setting)
    if measured:
        head = ("setting", *COLUMNS[2:], "without kltest")
        body = [_cells(line) for line in measured]
        yield "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))
    again = found[0].command.partition(" --setting")[0]
    yield f"Again: `{again}`, with `--setting NAME` for one row."


def _cells(line: Line) -> list[str]:
    mark = " **default**" if line.default else " *recipe*" if line.recipe else ""
    shown = f"[program]({PROGRAMS}/{line.file})" if line.file else ""
    return [f"`{line.setting}`{mark}", *(escape(one_line(line.cells[column])) for column in COLUMNS[2:]), shown]
