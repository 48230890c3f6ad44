"""Output formats, one module each, and the words and pictures that they share.

The module of a format has `render(reports, terminal=PLAIN) -> str`; formats that people read may have
`render_changes(changes, terminal=PLAIN) -> str` as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from kltest.errors import UsageError
from kltest.render.tables import PLAIN, Terminal
from kltest.report import Report

if TYPE_CHECKING:
    from kltest.render.changes import Changes


FORMATS = ("github", "html", "json", "junit", "markdown", "text")
Renderer = Callable[[Sequence[Report], Terminal], str]


def formats() -> tuple[str, ...]:
    """Return the names of all formats."""
    return FORMATS


def render_changes(name: str, changes: Changes, terminal: Terminal = PLAIN) -> str:
    """What changed since an earlier report in a format; empty where the format has no place for it."""
    renderer(name)
    module = import_module(f"{__name__}.{name}")
    return module.render_changes(changes, terminal) if hasattr(module, "render_changes") else ""


def renderer(name: str) -> Renderer:
    """The render function of a format; UsageError with the nearest name if there is none."""
    if name not in formats():
        near = difflib.get_close_matches(name.lower(), formats(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no output format {name!r}; {hint}the formats are {', '.join(formats())}")
    return import_module(f"{__name__}.{name}").render


def render(name: str, reports: Sequence[Report], terminal: Terminal = PLAIN) -> str:
    """The reports in a format, ending with a newline unless empty."""
    text = renderer(name)(reports, terminal)
    return text if text.endswith("\n") or not text else text + "\n"
