"""Templates of the scoreboard: HTML and SVG are escaped as such, Markdown where the template says so (`md`)."""

from jinja2 import Environment, PackageLoader, Template, select_autoescape

from kltest.render.markdown import escape
from kltest.render.words import one_line


def template(name: str) -> Template:
    """Return the template of that file name."""
    loader, escaped = PackageLoader("kltest.scoreboard"), select_autoescape(["html.j2", "svg.j2"])
    made = Environment(loader=loader, autoescape=escaped, trim_blocks=True, lstrip_blocks=True)
    made.filters["md"] = lambda text: escape(one_line(text))
    return made.get_template(name)
