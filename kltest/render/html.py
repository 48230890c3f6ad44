"""HTML: one self-contained page with pictures, nothing loaded from elsewhere, readable on a phone and in the dark."""

from collections.abc import Sequence
from functools import cache
from importlib import resources

from jinja2 import Environment

from kltest.render.pictures import bars, differ, tree
from kltest.render.tables import PLAIN, Terminal
from kltest.render.templating import environment
from kltest.render.words import visible
from kltest.report import CounterExample, Report

STYLE = resources.files("kltest.render").joinpath("templates/style.css.j2").read_text(encoding="utf-8")
"""The style sheet, shared with the scoreboard of libraries."""


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    return _templates().get_template("page.html.j2").render(reports=reports)


def fragment(report: Report) -> str:
    """Return a short form of a report for a notebook's cell: the verdict, the gradients and the failed checks."""
    return _templates().get_template("notebook.html.j2").render(report=report)


@cache
def _templates() -> Environment:
    made = environment(visible, autoescape=True)
    made.filters |= {"bars": bars, "tree": tree, "differs": _differs}
    return made


def _differs(example: CounterExample, row: int) -> bool:
    """True if the two gradients differ in a row of the table of numbers."""
    context, action = divmod(row, example.actions)
    prefix = example.contexts[context]
    return differ(prefix.truth[action], prefix.found[action])
