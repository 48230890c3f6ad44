"""The pages of the scoreboard: one in Markdown, one that is sorted and filtered in a browser, and the programs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kltest.render.html import STYLE
from kltest.render.markdown import escape
from kltest.render.words import one_line
from kltest.scoreboard.rows import Row
from kltest.scoreboard.table import COLUMNS, KINDS, following, frame
from kltest.truth import render

if TYPE_CHECKING:
    from pandas import DataFrame

FOLDER = Path(__file__).parent / "templates"
PROGRAMS = "programs"
SHORT = 4_000
"""Programs of up to so many characters are shown on the page itself."""
INTRODUCTION = (
    "Each row is one setting of one version of a library, called through the library's own code on every rollout "
    "of small environments. Its gradients were added up with their exact probabilities and the sum was named. One step "
    "is a single choice; sequences are three tokens, or up to three with an end token; off-policy means that "
    "another policy drew the rollouts (empty if a setting does not use that policy's log-probs). A factor before a "
    "name is the coefficient that is really applied if 1 is set. A library may follow another objective than KL(π‖ref) "
    "on purpose: a row says which gradient it follows, not that it is wrong."
)
MEANINGS = {
    "reverse_kl": "the gradient of the KL between whole sequences, which the objective of RLHF subtracts",
    "local_reverse_kl": "its next-token part: prefixes count as given, and no token is charged for what follows it",
    "forward_kl": "the gradient of the other KL, from the reference to the policy",
    "local_forward_kl": "the next-token part of the other KL",
    "zero": "no gradient in expectation, only noise",
}


def files(rows: Sequence[Row]) -> dict[str, str]:
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


def html(table: DataFrame) -> str:
    """Return the scoreboard as one page: nothing is loaded from elsewhere, and only its own script may run."""
    script = (FOLDER / "script.js.j2").read_text(encoding="utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return _rendered("libraries.html.j2", table, script=script, digest=digest, base_style=STYLE)


def _rendered(template: str, table: DataFrame, **values: Any) -> str:
    return (
        _environment()
        .get_template(template)
        .render(
            introduction=INTRODUCTION,
            meanings={render({name: 1.0}): meaning for name, meaning in MEANINGS.items()},
            columns=COLUMNS,
            kinds=KINDS,
            table=table,
            libraries=list(table.groupby("title", sort=False)),
            pairs=[(name, name) for name in table["library"].unique()],
            following=following,
            explained=explained(),
            programs=PROGRAMS,
            short=SHORT,
            goal=render({"reverse_kl": 1.0}),
            **values,
        )
    )


def explained() -> Mapping[str, str]:
    """Return the finding of each check by its code, for rows of which no message was kept."""
    from kltest.checks import CHECKS

    return {code: check.title for code, check in CHECKS.items()}


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader

    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=lambda name: ".html" in str(name),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(md=lambda text: escape(one_line(text)))
    return made
