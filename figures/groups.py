"""What masks of ties and std-normalisation do to the penalty: the gradient lost, the push of a tied group, the end.

Reads groups/groups.json among the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import FAINT, PAGE_WIDTH, look, tidy

Row = dict[str, Any]
SHADES = {1: "#fdbb84", 2: "#fc8d59", 3: "#ef6548", 4: "#d7301f", 8: "#990000", 16: "#4d0000"}
MARKERS = {1: "x", 2: "s", 3: "<", 4: "^", 8: "o", 16: "D"}
ENDS = {
    "k2-loss-sequence": "not masked: π*",
    "tied-groups-masked": "masked",
    "group-std": "std-normalised, where stopped",
}


def draw(results: Path) -> Figure:
    rows = json.loads((results / "groups" / "groups.json").read_text())
    figure = Figure(figsize=(PAGE_WIDTH, 2.35), layout="constrained")
    lost, push, end = figure.subplots(1, 3, width_ratios=(1.1, 0.9, 1.1))
    _lost(lost, [row for row in rows if row["part"] == "masking"])
    _push(push, [row for row in rows if row["part"] == "std"])
    _end(end, [row for row in rows if row["part"] == "training" and not row["batch_size"]])
    return figure


def _lost(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="a  Masked ties take gradient", x="probability of a right answer", y="share of ∇KL that is lost")
    for size in sorted({row["group_size"] for row in rows}):
        mine = [row for row in rows if row["group_size"] == size]
        x = sorted({row["success"] for row in mine})
        found = np.array([[row["lost"] for row in mine if row["success"] == one] for one in x])
        colour = SHADES.get(size, FAINT)
        axes.fill_between(x, found.min(axis=1), found.max(axis=1), color=colour, alpha=0.18, linewidth=0)
        axes.plot(x, found.mean(axis=1), color=colour, marker=MARKERS.get(size, "."), markersize=3, linewidth=1.1)
        middle = len(x) // 2
        axes.annotate(
            f"groups of {size}", (x[middle], found.mean(axis=1)[middle]), (3, 4), textcoords="offset points",
            size=6.2, color=colour,
        )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(-0.03, 1.12))


def _push(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="b  A tied group's push", x="coefficient β", y="length of the expected step")
    x = sorted({row["push"] for row in rows})
    for name, estimator, words, at, offset in (
        ("normalised", "group-std", "divided by the\ngroup's std", -3, (2, -20)),
        ("plain", "group-mean", "plain", -3, (14, -10)),
    ):
        found = np.array([np.mean([row[name] for row in rows if row["push"] == one]) for one in x])
        colour = look(estimator).colour
        axes.loglog(x, found, **look(estimator).plot())
        place = {"textcoords": "offset points", "size": 6.2, "color": colour, "ha": "center"}
        axes.annotate(words, (x[at], found[at]), offset, **place)
    axes.axvline(1e-4, color=FAINT, linewidth=0.6, linestyle=":")
    axes.annotate("ε in the\ndivision", (1e-4, axes.get_ylim()[0]), (4, 5), textcoords="offset points", size=6)


def _end(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="c  Where exact training ends", x="coefficient β", y="KL(π‖ref) at the end, nats")
    success = min({row["success"] for row in rows}, default=None)
    for name, words in ENDS.items():
        mine = sorted((row for row in rows if (row["estimator"], row["success"]) == (name, success)), key=_beta)
        if not mine:
            continue
        style = look(name).plot(linestyle="none" if name == "group-std" else look(name).line)
        axes.plot([row["beta"] for row in mine], [row["kl"] for row in mine], label=words, **style)
    axes.set(xscale="log", yscale="log")
    ticks = sorted({row["beta"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=axes.get_ylim()[0] / 5)  # room for the legend
    axes.legend(frameon=False, fontsize=6.2, loc="lower left")


def _beta(row: Row) -> float:
    return row["beta"]
