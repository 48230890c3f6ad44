"""One look for all figures: sizes, fonts and colours that survive print, grey and colour-blind eyes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from pandas import DataFrame

# Figures take from here whatever they are made of.
from kltest.reproduce.frames import Row, records, select  # noqa: F401

Point = tuple[float, float]
# Inches and points as printed: a figure is exactly as wide as the paper's text, A4 less two margins of 2.6 cm, so that
# nothing is scaled. All words have one size, titles the other.
PAGE_WIDTH = (21 - 2 * 2.6) / 2.54
SIZE, TITLE = 7.0, 8.0

INK = "#1a1a1a"
FAINT = "#8a8a8a"
HAIRLINE = "#d9d9d9"
# Right gradients are blue, wrong ones go from pale to dark orange-brown: apart in hue for every common kind of
# colour blindness, and apart in lightness from a mid-grey on, so that it can be read without colour.
RIGHT = "#cfe3f3"
RIGHT_INK = "#0b3c66"
BIAS = LinearSegmentedColormap.from_list("bias", ["#fff7ea", "#fde0b8", "#f5b26b", "#d9772b", "#9c4210", "#5e2306"])
# Sizes and strengths, from small to large: a colour that no estimator has.
ORDER = LinearSegmentedColormap.from_list("order", ["#dfa8c3", "#b0447d", "#3d0a24"])

_SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": SIZE,
    "axes.titlesize": TITLE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
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


@dataclass(frozen=True)
class Look:
    """Look of an estimator in every figure, and its name there. Line and marker tell it apart if colour does not."""

    colour: str
    line: str = "-"
    marker: str = "o"
    words: str = ""

    def plot(self, **options: Any) -> dict[str, Any]:
        """The keyword arguments of matplotlib's `plot`."""
        chosen = {"color": self.colour, "linestyle": self.line, "marker": self.marker, "linewidth": 1.1}
        return {**chosen, "markersize": 3.2, "markeredgewidth": 0.6, **options}


# Okabe and Ito's colours, which common kinds of colour blindness keep apart: blues follow the true gradient on
# sequences, greens are k2, reds and oranges k3, purples have a ratio, greys are no penalty at all.
_BLUE, _SKY, _GREEN, _VERMILION, _ORANGE, _PURPLE = "#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7"
_DARK_GREEN, _DARK_BLUE, _DARK_PURPLE, _BROWN = "#00563f", "#0b3c66", "#8b3a6b", "#7a3300"
LOOKS = {
    "truth": Look(INK, "-", ""),
    "none": Look(FAINT, ":", "", "no penalty"),
    "k1-loss": Look(FAINT, "-", "x", "k₁ in the loss"),
    "k2-loss": Look(_GREEN, "-", "s", "k₂ in the loss"),
    "k2-loss-sequence": Look(_DARK_GREEN, "--", "D", "k₂ of the sequence, in the loss"),
    "k3-loss": Look(_VERMILION, "-", "^", "k₃ in the loss"),
    "k3-loss-sequence": Look(_BROWN, "--", "v", "k₃ of the sequence, in the loss"),
    "abs-loss": Look("#999933", "-.", "P", "|u| in the loss"),
    "full-loss": Look(_SKY, "-", "h", "exact next-token KL"),
    "k1-reward": Look(_BLUE, "-", "o", "k₁ in the reward"),
    "k1-reward-to-go": Look(_DARK_BLUE, "--", "o", "k₁ in the reward, to go"),
    "k1-reward-immediate": Look(_SKY, "--", "<", "k₁ in the reward, own token"),
    "k1-reward-stale": Look(FAINT, "--", "+"),
    "k2-reward": Look("#66a61e", ":", "s", "k₂ in the reward"),
    "k3-reward": Look(_ORANGE, "-", "d", "k₃ in the reward"),
    "k3-reward-sequence": Look(_ORANGE, "--", "d"),
    "full-reward": Look(_SKY, ":", "h"),
    "k1-both": Look(_DARK_BLUE, ":", "*", "k₁ in both"),
    "k3-both": Look(_DARK_BLUE, "-.", "X", "k₃ in both"),
    "rao-blackwell": Look("#332288", "-", "p", "Rao–Blackwell"),
    "lambda-baseline": Look("#332288", "--", "8"),
    "k3-ratio": Look(_PURPLE, "-", "^"),
    "k3-ratio-detached": Look(_PURPLE, "--", "v"),
    "k2-ratio": Look(_DARK_PURPLE, "-", "s"),
    "k2-ratio-detached": Look(_DARK_PURPLE, "--", "D"),
    "k2-prefix-ratio": Look(_DARK_BLUE, "-", "s"),
    "k1-reward-sequence-ratio": Look(_BLUE, "--", "o"),
    "k1-reward-to-go-prefix-ratio": Look(_BLUE, "-.", ">"),
    "k3-broadcast-ratio": Look(_PURPLE, "-.", "<"),
    "last-token": Look("#b8860b", ":", "1", "last token"),
    "length-normalised": Look("#88ccee", ":", "2", "divided by length"),
    "token-mean": Look("#44aa99", ":", "3"),
    "group-mean": Look(_GREEN, ":", "o"),
    "leave-one-out": Look(_BLUE, ":", "o", "k₁ less the others' mean"),
    "group-std": Look("#b8860b", ":", "o"),
    "tied-groups-masked": Look("#882255", "-.", "P"),
}


def look(estimator: str) -> Look:
    """The look of a registered estimator; one that has none yet is thin and grey, and should be given one."""
    return LOOKS.get(estimator, Look(FAINT, "-.", "."))


def panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure as wide as the text, `height` inches high, and its panels: two in a row, read row by row."""
    figure = Figure(figsize=(PAGE_WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.05)
    return figure, list(figure.subplots(-(-count // 2), 2).flat)


def band(axes: Axes, rows: DataFrame, x: str, y: str, *, alpha: float, **line: Any) -> DataFrame:
    """Draw the mean by a column as a line and the extremes as a band; return them."""
    found = rows.groupby(x)[y].agg(["min", "max", "mean"])
    axes.fill_between(found.index, found["min"], found["max"], color=line["color"], alpha=alpha, linewidth=0)
    axes.plot(found.index, found["mean"], **line)
    return found


def label(axes: Axes, words: str, at: Point, offset: Point, colour: Any = INK, **options: Any) -> None:
    """Write words beside a point, `offset` in points away from it."""
    axes.annotate(words, at, offset, textcoords="offset points", color=colour, **options)


# Points between words at the ends of lines.
APART = 8.8


def name_ends(axes: Axes, lines: Iterable[tuple[str, Point, Any]]) -> None:
    """Write words beside the ends of lines (words, point, colour), APART points from each other at least.

    Scales and limits of the axes must be set before.
    """
    points = 72 * axes.figure.get_figheight() * axes.get_position().height
    shares = (axes.transData + axes.transAxes.inverted()).transform
    found = sorted(((points * shares(at)[1], words, at, colour) for words, at, colour in lines), key=lambda one: one[0])
    places = [place for place, *_ in found]
    for low in [*range(len(places) - 1)] * 50:
        short = max(0.0, APART - (places[low + 1] - places[low])) / 2
        places[low : low + 2] = places[low] - short, places[low + 1] + short
    for place, (own, words, at, colour) in zip(places, found, strict=True):
        label(axes, words, at, (5, place - own), colour, va="center")


def note(axes: Axes, x: float, y: float, words: str, **options: Any) -> None:
    """Write words at a place given in shares of the axes."""
    axes.text(x, y, words, transform=axes.transAxes, **options)


def tidy(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Labels on, frame off: only the two axes that are read; a light grid behind."""
    axes.set_title(title)
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=HAIRLINE, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.tick_params(width=0.6, length=2.5)
