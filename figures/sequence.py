"""What a token-level loss misses on sequences, by length and steering; and two stable ends for one coefficient."""

from typing import Any

from .style import INK, ORDER, PAGE_WIDTH, Axes, DataFrame, Figure, band, look, select, tidy

READS = ("sequence", "tabular-mdp")
# Steerings that are drawn of all that were computed, and the reference whose ends are.
SHOWN = (0.0, 0.5, 0.75, 0.9, 0.99)
REFERENCE = 0.02


def draw(rows: DataFrame, processes: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiments."""
    figure = Figure(figsize=(PAGE_WIDTH, 2.15), layout="constrained")
    length, steering, ends = figure.subplots(1, 3)
    _length(length, select(rows, "length"))
    _steering(steering, select(rows, "length"))
    _ends(ends, select(processes, "length"))
    return figure


def _shade(steering: float) -> Any:
    """Darker for stronger steering."""
    return ORDER(steering**2)


def bands(axes: Axes, rows: DataFrame, by: str, quantity: str) -> None:
    """A line for each steering: the mean over draws, and all draws as a band."""
    for steering, mine in select(rows, steering=SHOWN).groupby("steering"):
        words = f"κ = {steering:g}"
        band(axes, mine, by, quantity, alpha=0.2, color=_shade(steering), lw=1.2, marker="o", ms=2, label=words)


def _length(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  What is missed", x="length T (tokens)", y="‖missed part‖ / ‖∇KL‖")
    bands(axes, rows, "length", "missed")
    axes.set(xscale="log", ylim=(-0.06, 2.1))
    axes.legend(loc="upper left", ncols=2, handlelength=1.4, columnspacing=1.0, labelspacing=0.25)


def _steering(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  Direction that is left", x="steering κ", y="cosine with ∇KL")
    style = {"color": look("k2-loss").colour, "lw": 1.2, "marker": "s", "ms": 2.4}
    for length, line in ((2, ":"), (10, "--"), (rows["length"].max(), "-")):
        mine = select(rows, length=length)
        if len(mine):
            band(axes, mine, "steering", "cosine", alpha=0.15, ls=line, label=f"T = {length:,}", **style)
    axes.axhline(0, color=INK, lw=0.6)
    axes.legend(loc="lower left", labelspacing=0.25, handlelength=2.4)
    axes.set_ylim(-0.6, 1.1)


def _ends(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Fixed points", x="coefficient β", y="chance of going on")
    shown = select(rows, reference=REFERENCE)
    for followed, stable, options in (
        ("local_reverse_kl", True, look("k2-loss").plot(linestyle="", label="token-level: stable")),
        ("local_reverse_kl", False, look("k2-loss").plot(linestyle="", mfc="white", label="token-level: unstable")),
        ("reverse_kl", True, {"color": look("k1-reward").colour, "lw": 1.2, "label": "correct gradient"}),
    ):
        mine = select(shown, followed=followed, stable=stable).sort_values("beta")
        axes.plot(mine["beta"], mine["chance"], **options)
    axes.set_ylim(-0.05, 1.75)
    axes.legend(loc="upper right", labelspacing=0.25, handlelength=1.6)
