"""The two pages of the scoreboard, in Markdown and in HTML, with the programs that they link to."""

from collections.abc import Sequence
from typing import Any

from pandas import DataFrame

from kltest.adapters import DEPTHS
from kltest.checks import CHECKS
from kltest.render.html import STYLE
from kltest.scoreboard import recorded
from kltest.scoreboard.classes import CLASSES
from kltest.scoreboard.rows import BoardRow
from kltest.scoreboard.table import COLUMNS, FRESH, MOST, OURS, SUMMARY, TONES, defaults, following, frame, summary
from kltest.scoreboard.templating import template

PROGRAMS = "programs"
# Longest program, in characters, that is shown on the page itself.
SHORT = 4_000


def files(rows: Sequence[BoardRow]) -> dict[str, str]:
    """Return the files of the scoreboard by their path below one folder.

    Args:
        rows: rows as measuring writes them, or `kltest.scoreboard.recorded.read()`.

    Returns:
        `libraries.md`, `libraries.html` (self-contained) and the programs `programs/*.py` that both link to.
    """
    table = frame(rows)
    files, texts = table["file"], table["program"]
    programs = {f"{PROGRAMS}/{file}": text + "\n" for file, text in zip(files, texts, strict=True) if file}
    return {"libraries.md": markdown(table), "libraries.html": html(table), **programs}


def markdown(table: DataFrame) -> str:
    """Return the scoreboard, as `table.frame` gives it, in Markdown."""
    return _rendered("libraries.md.j2", table)


def facts(row: BoardRow) -> str:
    """Return what is recorded of a setting, and the program that shows its gradient, in Markdown."""
    line = frame([row]).iloc[0].to_dict()
    same = [each for each in recorded.read() if (each["library"], each["version"]) == (row["library"], row["version"])]
    right = following(frame(same, programs=False), off_policy=line["kind"] == "on-policy").to_dict("records")
    instead = [each for each in right if each["setting"] != row["setting"] and each["family"] == line["family"]]
    words = {"columns": COLUMNS, "ours": OURS, "fresh": FRESH, "sentence": CLASSES[line["kind"]].sentence}
    return template("facts.md.j2").render(line=line, row=row, instead=instead, **words)


def html(table: DataFrame) -> str:
    """Return the scoreboard as one static page: nothing is loaded from elsewhere, and no script runs."""
    return _rendered("libraries.html.j2", table, base_style=STYLE)


def _rendered(name: str, table: DataFrame, **values: Any) -> str:
    return template(name).render(
        columns=COLUMNS,
        classes=CLASSES,
        kinds=[kind for kind in CLASSES if kind in set(table["kind"])],
        depths=DEPTHS,
        defaults=defaults(list(table["row"])).to_dict("records"),
        summary=summary(list(table["row"])).to_dict("records"),
        headings=SUMMARY,
        tones=TONES,
        most=MOST,
        ours=OURS,
        fresh=FRESH,
        table=table,
        libraries=list(table.groupby("title", sort=False)),
        # For rows without messages.
        findings={code: check.title for code, check in CHECKS.items()},
        programs=PROGRAMS,
        short=SHORT,
        **values,
    )
