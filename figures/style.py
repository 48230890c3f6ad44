"""One look for all figures: sizes, fonts and colours that survive print, grey and colour-blind eyes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap

PAGE_WIDTH = 7.0  # inches: the text width of the paper

INK = "#1a1a1a"
FAINT = "#8a8a8a"
HAIRLINE = "#d9d9d9"
# What is right is blue, what is wrong goes from pale to dark orange-brown: apart in hue for every common kind of
# colour blindness, and apart in lightness from a mid-grey on, so that it can be read without colour.
RIGHT = "#cfe3f3"
RIGHT_INK = "#0b3c66"
BIAS = LinearSegmentedColormap.from_list("bias", ["#fff7ea", "#fde0b8", "#f5b26b", "#d9772b", "#9c4210", "#5e2306"])

_SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 7.0,
    "mathtext.fontset": "dejavusans",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "figure.dpi": 100,
    "savefig.dpi": 220,
    "pdf.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "kltest",
    "path.simplify": True,
}


@contextmanager
def styled() -> Iterator[None]:
    """Settings for everything drawn and saved inside; nothing that the user has set elsewhere gets in."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def ink_on(colour: tuple[float, ...]) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = colour[:3]
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.52 else "#ffffff"
