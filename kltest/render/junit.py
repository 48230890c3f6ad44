"""JUnit XML, for Jenkins, GitLab and most CI services: a suite per target, a case per gradient row and per check.

A case fails or errs exactly if the verdict is not `confirmed`; warnings go to `system-out`.
"""

from collections.abc import Sequence
from functools import partial
from xml.sax.saxutils import quoteattr

from markupsafe import Markup

from kltest.render import PLAIN, Terminal
from kltest.render.words import visible
from kltest.report import Report


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return reports as JUnit's XML, a suite for each loss and a case for each check."""
    from kltest.render.templating import environment  # Jinja2 is loaded when something is rendered

    text = partial(visible, keep="\n\t")
    made = environment(text, autoescape=True)
    made.filters["quoted"] = lambda value: Markup(quoteattr(text(value)))
    return made.get_template("report.xml.j2").render(reports=reports)
