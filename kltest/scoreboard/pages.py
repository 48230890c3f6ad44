"""All files of the scoreboard, by their path below one folder."""

from __future__ import annotations

from collections.abc import Sequence

from kltest.scoreboard import markdown, page
from kltest.scoreboard.rows import Row
from kltest.scoreboard.table import lines


def files(rows: Sequence[Row]) -> dict[str, str]:
    """The page in Markdown, the same for a browser, and the programs that show rows without kltest."""
    programs = {f"{markdown.PROGRAMS}/{line.file}": f"{line.program}\n" for line in lines(rows) if line.file}
    return {"libraries.md": markdown.render(rows), "libraries.html": page.render(rows), **programs}
