"""Output formats, one module each, and the words and pictures that they share.

The module of a format has `render(reports, terminal=PLAIN) -> str`; formats that people read may have
`render_changes(changes, terminal=PLAIN) -> str` as well.
"""

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kltest.errors import UsageError, did_you_mean
from kltest.render.tables import PLAIN, Terminal
from kltest.report import FORMS, Report

if TYPE_CHECKING:
    from kltest.render.changes import Changes


FORMATS = ("github", "html", "json", "junit", "markdown", "sarif", "text")


def module_of(name: str) -> Any:
    """Return the module of a format.

    Raises:
        UsageError: If there is no such format; the message has the nearest name.
    """
    return import_module(f"{__name__}.{known(name, FORMATS)}")


def known(name: str, formats: Collection[str]) -> str:
    """Return the name of a format; UsageError with the nearest name if it is unknown."""
    if name not in formats:
        hint = did_you_mean(name, formats)
        raise UsageError(f"there is no output format {name!r}; {hint}the formats are {', '.join(formats)}")
    return name


def render(name: str, reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """Return the reports in a format, ending with a newline unless empty."""
    text = module_of(name).render(reports, terminal)
    return text if text.endswith("\n") or not text else text + "\n"


def render_changes(name: str, changes: "Changes", terminal: Terminal = PLAIN) -> str:
    """Return what changed since an earlier report; empty if the format has no place for it."""
    module = module_of(name)
    return module.render_changes(changes, terminal) if hasattr(module, "render_changes") else ""


FORMS.update(
    text=lambda report, verbose: render("text", [report], Terminal(verbose=verbose)).rstrip("\n"),
    html=lambda report: module_of("html").fragment(report),
)
