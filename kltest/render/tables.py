"""Tables and paragraphs for terminals, in colour only if the terminal has it."""

import io
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

NARROWEST = 40
"""Smallest width in columns; a narrower terminal breaks the lines itself."""


@dataclass(frozen=True)
class Terminal:
    """Width of the output in columns, whether colour may be used, and how much of a report is printed.

    A report is its first screen, all of it with `verbose`, and one line with `quiet`.
    """

    width: int = 100
    colour: bool = False
    verbose: bool = False
    quiet: bool = False


PLAIN = Terminal()


def table(
    columns: Sequence[str],
    rows: "Iterable[Sequence[str | Text]]",
    *,
    right: Collection[str] = (),
    whole: Collection[str] | None = None,
    indent: int = 0,
    terminal: Terminal = PLAIN,
) -> str:
    """Return a table without lines between its cells; cells wrap so that it fits the terminal.

    Args:
        columns: Heads of the columns; no heads are printed if all are empty.
        rows: Cells, as many as columns; a rich `Text` brings its own style.
        right: Heads of the columns that are aligned to the right.
        whole: Heads of the columns whose cells stay on one line if they can; by default the first.
        indent: Spaces before every line.
        terminal: Width and colour.

    Returns:
        The lines, without a newline at the end; without colour there are no spaces at their ends.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    width = max(terminal.width, NARROWEST) - indent
    kept = columns[:1] if whole is None else whole
    found = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns), header_style="dim", pad_edge=False)
    for number, head in enumerate(columns):
        widest = max([Text(head).cell_len, *(row[number].cell_len for row in cells)])
        found.add_column(
            Text(head),
            justify="right" if head in right else "left",
            overflow="fold",
            min_width=min(widest, width // 2) if head in kept else None,
        )
    for row in cells:
        found.add_row(*row)
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal.colour,
        color_system="standard" if terminal.colour else None,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as captured:
        console.print(found)
    return "\n".join(" " * indent + line.rstrip() for line in captured.get().splitlines())


def wrap(text: str, terminal: Terminal = PLAIN, *, indent: str = "", first: str | None = None) -> list[str]:
    """Return a paragraph as lines; `first` is the indent of the first one.

    Lines are broken at spaces only: a name, a path or a number that is longer than a line stays whole, to be copied.
    (rich would break or crop it, hence textwrap.)
    """
    return textwrap.wrap(
        text.strip(),
        max(terminal.width, NARROWEST),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def paint(text: str, style: str, terminal: Terminal) -> str:
    """Return the text in a style of rich, or as it is on a terminal without colour."""
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD) if terminal.colour else text


def by_status(
    statuses: Sequence[str], found: Sequence[tuple[str, str, str, str]], terminal: Terminal = PLAIN
) -> Iterator[str]:
    """Yield a table for each status that something has: rows of (status, name, message, code of a check or "")."""
    for status in statuses:
        rows = [(name, message + (f" ({code})" if code else "")) for own, name, message, code in found if own == status]
        if rows:
            yield status.capitalize()
            yield table(("", ""), rows, indent=2, terminal=terminal)
