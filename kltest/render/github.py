"""GitHub Actions annotations: `::error` for a failed check, `::warning` for a warning, `::notice` for the rest."""

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from kltest.render import PLAIN, Terminal
from kltest.render.sarif import in_checkout
from kltest.render.words import visible
from kltest.report import Report

DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
PROPERTY = {**DATA, **str.maketrans({":": "%3A", ",": "%2C"})}


def render(reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    from kltest.render.templating import environment  # Jinja2 is loaded when something is rendered

    made = environment(lambda text: visible(text, keep="\r\n").translate(DATA))
    made.filters |= {"property": _property, "place": _place}
    return made.get_template("report.github.j2").render(reports=reports)


def _property(text: str) -> Markup:
    return Markup(visible(text, keep="\r\n").translate(PROPERTY))


def _place(report: Report) -> Markup:
    """File and line of the loss, its path from the root of the checkout as GitHub wants it; "" if it lies elsewhere."""
    given = re.match(r"(.+\.py):\w", report.target)
    path, line = report.source or (given[1] if given else "", 0)
    if not path or Path(inside := in_checkout(path)).is_absolute():
        return Markup("")
    file = _property(inside)
    return Markup(f"file={file},line={line}," if line else f"file={file},")
