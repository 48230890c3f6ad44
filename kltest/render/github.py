"""GitHub Actions annotations: `::error` for a failed check, `::warning` for a warning, `::notice` for the rest."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from kltest.render import PLAIN, Terminal
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
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    if not path or not Path(path).resolve().is_relative_to(root):
        return Markup("")
    file = _property(Path(path).resolve().relative_to(root).as_posix())
    return Markup(f"file={file},line={line}," if line else f"file={file},")
