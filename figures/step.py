"""The step that is taken: where exact next-token KLs add noise, and how many rollouts a sequence's ratio needs."""

import math
from itertools import product

import numpy as np
from matplotlib.colors import to_hex

from .style import FAINT, INK, ORDER, PAGE_WIDTH, Axes, DataFrame, Figure, Look, look, select, tidy

READS = ("off-policy",)
STARTS = {"reference": Look("#1f77b4", "none", "o"), "away": Look("#b8860b", "none", "x")}
LINES, MARKERS = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), "osd^v"
WAYS = {
    "token": ("token’s ratio", look("k3-ratio")),
    "prefix": ("prefix ratios", look("k2-prefix-ratio")),
    "sequence": ("sequence’s ratio", look("k1-reward-sequence-ratio")),
}
BATCH = 512
DRIFTS = {"engine": "Engine", "age": "Older policy"}
FAMILIES = {"bigram": "sums", "mistakes": "pass/fail"}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure = Figure(figsize=(PAGE_WIDTH, 4.0), layout="constrained")
    exact, *boundaries, error = figure.subplots(2, 3).flat
    rows = select(rows, "step")
    _exact(exact, select(rows, drift="none"))
    # Of trained policies.
    trained = select(rows, drift=tuple(DRIFTS), made=lambda one: one > 0)
    for axes, letter, (drift, family) in zip(boundaries, "bcde", product(DRIFTS, FAMILIES), strict=True):
        title = f"{letter}  {DRIFTS[drift]}, {FAMILIES[family]}"
        _boundary(axes, select(trained, drift=drift, family=family), title)
        axes.sharey(boundaries[0])
    _errors(error, select(trained, drift="engine", family="bigram"))
    return figure


def _exact(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  Exact next-token KLs", x="slope, over β", y="noise / that of sampled ones")
    for start, style in STARTS.items():
        mine = select(rows, start=start, slope=lambda one: one.notna())
        x = mine["slope"].astype(float).clip(-1.5, 3.5)
        axes.plot(x, mine["exact"], label=f"start: {start}", **style.plot(markersize=2.4, alpha=0.6))
    axes.axhline(1, color=INK, linewidth=0.6)
    axes.axvline(0.5, color=INK, linewidth=0.6, linestyle=":")
    axes.set(yscale="log", xlim=(-1.6, 3.6), ylim=(5e-3, 1e6))
    axes.legend(loc="upper left", handletextpad=0.1)


def _boundary(axes: Axes, rows: DataFrame, title: str) -> None:
    tidy(axes, title=title, x="KL(π‖μ) of a rollout, nats", y="rollouts needed")
    lengths = sorted(rows["tokens"].unique())
    for place, tokens in enumerate(lengths):
        mine = select(rows, tokens=tokens)
        middle = mine["even"].astype(float).fillna(math.inf).groupby(mine["nats"]).median()
        style = Look(to_hex(ORDER(place / (len(MARKERS) - 1))), LINES[place], MARKERS[place])
        axes.plot(middle.index, middle, label=f"{tokens:g} tokens", **style.plot())
    axes.set(xscale="log", yscale="log", ylim=(1.5, 1e9))
    axes.legend(loc="upper left")


def _errors(axes: Axes, rows: DataFrame) -> None:
    longest = rows["tokens"].max()
    words = "error / error without a ratio"
    tidy(axes, title=f"f  Errors, {longest:g} tokens", x="KL(π‖μ) of a rollout, nats", y=words)
    rows = select(rows, tokens=longest)
    none = _error(rows, "none")
    for way, (label, style) in WAYS.items():
        ratio = np.log(_error(rows, way) / none).fillna(math.inf)
        middle = np.exp(ratio.groupby(rows["nats"]).median())
        axes.plot(middle.index, middle, label=label, **style.plot())
    axes.axhline(1, color=FAINT, linewidth=0.8)
    axes.set(xscale="log", yscale="log", ylim=(0.2, 1e6))
    axes.legend(loc="upper left")


def _error(rows: DataFrame, way: str) -> DataFrame:
    """Mean squared error of a batch's gradient, over ‖∇J‖²: bias, noise and ζ₂ of its two rollouts."""
    bias, noise, pairs = (rows[f"{name}_{way}"].astype(float) for name in ("bias", "noise", "pairs"))
    return bias**2 + ((BATCH - 2) * noise + 2 * pairs) / (BATCH * (BATCH - 1))
