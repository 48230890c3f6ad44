"""Markdown, for job summaries and issues."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup

from kltest.render.changes import Changes
from kltest.render.tables import PLAIN, Terminal
from kltest.render.words import one_line, visible
from kltest.report import Report

if TYPE_CHECKING:
    from jinja2 import Environment


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return reports as Markdown."""
    return _templates().get_template("report.md.j2").render(reports=reports).removesuffix("\n")


def render_changes(changes: Changes, terminal: Terminal = PLAIN) -> str:
    """Return what changed since an earlier report, in one table for all targets."""
    return _templates().get_template("changes.md.j2").render(changes=changes)


def escape(text: str) -> str:
    """Return plain text that no Markdown reader takes for markup, a link, a mention or the end of a table cell."""
    escaped = re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", visible(text, keep=""))
    return escaped.replace("&", "&amp;").replace("@", "&#64;").replace("://", "&#58;//")


@cache
def _templates() -> "Environment":
    # Jinja2 is loaded when something is rendered: the command line imports this module for `escape`.
    from kltest.render.templating import environment

    made = environment(lambda text: escape(one_line(text)))
    made.filters |= {"code": _code, "fenced": _fenced, "row": _row}
    return made


def _row(cells: Iterable[str]) -> Markup:
    return Markup("| {} |".format(" | ".join(cell if isinstance(cell, Markup) else escape(cell) for cell in cells)))


def _code(text: str) -> Markup:
    """A code span; its fence is longer than any run of backticks in it."""
    text = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall(r"`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Markup(f"{fence}{space}{text}{space}{fence}")


def _fenced(text: str, language: str = "", indent: str = "") -> Markup:
    """A block of code; `indent` makes it a part of a list's item."""
    text = visible(text.rstrip())
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    lines = (fence + language, *text.splitlines(), fence)
    return Markup("\n".join((indent + line).rstrip() for line in lines))
