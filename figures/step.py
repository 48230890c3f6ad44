"""The step that is taken: where exact next-token KLs add noise, and how many rollouts a sequence's ratio needs."""

import math

import numpy as np
from matplotlib.colors import to_hex

from .style import FAINT, INK, ORDER, Axes, DataFrame, Figure, Look, look, panels, select, tidy

READS = ("off-policy",)
STARTS = {"reference": Look("#1f77b4", "none", "o"), "away": Look("#b8860b", "none", "x")}
LINES, MARKERS = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), "osd^v"
WAYS = {
    "token": ("token’s ratio", look("k3-ratio")),
    "prefix": ("prefix ratios", look("k2-prefix-ratio")),
    "sequence": ("sequence’s ratio", look("k1-reward-sequence-ratio")),
}
BATCH = 512
DRIFTS = {"engine": "b  A noisy engine as sampler", "age": "c  An older policy as sampler"}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (exact, noisy, older, error) = panels(4, 4.6)
    rows = select(rows, "step")
    _exact(exact, select(rows, drift="none"))
    # Of trained policies; on a single decision all ratios are one.
    trained = select(rows, drift=tuple(DRIFTS), made=lambda one: one > 0, tokens=lambda one: one > 1)
    for axes, (drift, title) in zip((noisy, older), DRIFTS.items(), strict=True):
        _boundary(axes, select(trained, drift=drift), title)
    older.sharey(noisy)
    _errors(error, trained)
    return figure


def _exact(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  Exact next-token KLs", x="slope of the return, over β", y="noise / that of sampled ones")
    for start, style in STARTS.items():
        mine = select(rows, start=start, slope=lambda one: one.notna())
        x = mine["slope"].astype(float).clip(-1.5, 3.5)
        axes.plot(x, mine["exact"], label=f"start: {start}", **style.plot(markersize=2.4, alpha=0.6))
    axes.axhline(1, color=INK, linewidth=0.6)
    axes.axvline(0.5, color=INK, linewidth=0.6, linestyle=":")
    axes.set(yscale="log", xlim=(-1.6, 3.6))
    axes.legend(loc="lower right")


def _boundary(axes: Axes, rows: DataFrame, title: str) -> None:
    tidy(axes, title=title, x="KL(π‖μ) of a rollout, nats", y="rollouts needed")
    lengths = sorted(rows["tokens"].unique())
    for place, tokens in enumerate([one for one in lengths if one >= 10 or len(lengths) < len(MARKERS)]):
        mine = select(rows, tokens=tokens)
        middle = mine["even"].astype(float).fillna(math.inf).groupby(mine["nats"]).median()
        style = Look(to_hex(ORDER(place / (len(MARKERS) - 1))), LINES[place], MARKERS[place])
        axes.plot(middle.index, middle, label=f"{tokens:g} tokens", **style.plot())
    axes.set(xscale="log", yscale="log", ylim=(1.5, 1e9))
    axes.legend(loc="upper left")


def _errors(axes: Axes, rows: DataFrame) -> None:
    longest = rows["tokens"].max()
    words = "error / error without a ratio"
    tidy(axes, title=f"d  {longest} tokens, {BATCH} rollouts", x="KL(π‖μ) of a rollout, nats", y=words)
    rows = select(rows, tokens=longest)
    none = _error(rows, "none")
    for way, (label, style) in WAYS.items():
        ratio = np.log(_error(rows, way) / none).fillna(math.inf)
        middle = np.exp(ratio.groupby(rows["nats"]).median())
        axes.plot(middle.index, middle, label=label, **style.plot())
    axes.axhline(1, color=FAINT, linewidth=0.8)
    axes.set(xscale="log", yscale="log", ylim=(0.2, 1e4))
    axes.legend(loc="upper left")


def _error(rows: DataFrame, way: str) -> DataFrame:
    """Mean squared error of a batch's gradient, over ‖∇J‖²: bias, noise and ζ₂ of its two rollouts."""
    bias, noise, pairs = (rows[f"{name}_{way}"].astype(float) for name in ("bias", "noise", "pairs"))
    return bias**2 + ((BATCH - 2) * noise + 2 * pairs) / (BATCH * (BATCH - 1))
