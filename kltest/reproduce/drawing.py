"""Draws the figures: each script of figures/ has `draw(rows) -> Figure` and reads nothing but results.

`READS` names the experiments whose results it is called with, a frame each (if it is missing: the one that is called
like the figure).
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kltest.errors import KltestError
from kltest.files import write
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.frames import frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What would differ from one drawing to the next, by format; random names are ruled out by the style's hash salt.
DATES: dict[str, tuple[str, ...]] = {"pdf": ("CreationDate", "ModDate"), "svg": ("Date",), "png": ()}


def sources(checkout: Checkout, name: str) -> tuple[str, ...]:
    """Return the experiments that a figure reads."""
    return getattr(checkout.load("figures", name), "READS", (name,))


def draw(checkout: Checkout, name: str, output: Path) -> list[Path]:
    """Draw one figure from the results in `output` and write it as PDF, SVG and PNG to output/figures/."""
    # Matplotlib chooses its back end when it is first imported; these drawings need no display.
    os.environ.setdefault("MPLBACKEND", "agg")
    script, style = checkout.load("figures", name), checkout.load("figures", "style")
    # Fonts and resolution count when a figure is saved as much as when it is drawn.
    with style.styled():
        try:
            files = [output / source / f"{source}.json" for source in sources(checkout, name)]
            figure = script.draw(*(frame(json.loads(file.read_text(encoding="utf-8"))) for file in files))
        except FileNotFoundError as error:
            raise KltestError(f"there is no {error.filename} to draw; `kltest reproduce` makes it") from error
        return [write(output / "figures" / f"{name}.{kind}", render(figure, kind)) for kind in DATES]


def render(figure: Figure, kind: str) -> bytes:
    """Return the figure as a file's content: the same bytes every time, so without a date."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, metadata=dict.fromkeys(DATES[kind]))
    return content.getvalue()
