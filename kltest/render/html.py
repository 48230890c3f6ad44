"""HTML: one self-contained page with pictures, nothing loaded from elsewhere, readable on a phone and in the dark."""

from collections.abc import Sequence
from functools import cache
from importlib import resources

from jinja2 import Environment

from kltest.render import pictures
from kltest.render.tables import PLAIN, Terminal
from kltest.render.templating import environment
from kltest.render.words import visible
from kltest.report import Report

STYLE = resources.files("kltest.render").joinpath("templates/style.css.j2").read_text(encoding="utf-8")
"""The style sheet, shared with the scoreboard of libraries."""


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return reports as one HTML page that needs no other file."""
    return templates().get_template("page.html.j2").render(reports=reports)


def fragment(report: Report) -> str:
    """Return a short form of a report for a notebook's cell: the verdict, the gradients and the failed checks."""
    return templates().get_template("notebook.html.j2").render(report=report)


@cache
def templates() -> Environment:
    """Return the templates of pages and of pictures."""
    made = environment(visible, autoescape=True)
    made.globals["draw"] = pictures
    return made
