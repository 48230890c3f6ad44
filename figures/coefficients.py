"""What a coefficient buys: reward against KL beside all optima, the distance from π*, and the effective coefficient.

Reads coefficients/coefficients.json among the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .style import FAINT, INK, PAGE_WIDTH, look, tidy

Row = dict[str, Any]
WORLDS = {"bandit": "bandit", "sequence": "sequences of 3 tokens", "mdp": "MDP, 3 steps"}
# One of each kind; those that follow the same gradient end at the same place.
SHOWN = {
    "k1-reward": "k1 in reward (and all others that follow ∇KL)",
    "k2-loss": "token k2, exact next-token KL: local gradient",
    "k3-loss": "token k3 in loss (GRPO)",
    "k3-loss-sequence": "sequence k3 in loss",
    "length-normalised": "divided by length",
    "last-token": "last token only",
    "k2-reward": "k2 in reward",
    "k3-reward": "k3 in reward",
    "none": "no penalty, or k1 in loss",
}
NOTES = (
    "Symbols: exact training; those of k3 in the reward are missing where it diverged. "
    "Crosses: sampled training, quartiles.",
    "Open circles: the predicted fixed point. Bands: several worlds of a kind, extremes. "
    "Returns have a standard deviation of about 1.",
)
SMALLEST = 1e-8  # what is nearer than this is drawn here, and called 0


def draw(results: Path) -> Figure:
    rows = json.loads((results / "coefficients" / "coefficients.json").read_text())
    figure = Figure(figsize=(PAGE_WIDTH, 6.7))
    axes = figure.subplots(3, 3)
    figure.subplots_adjust(left=0.082, right=0.99, top=0.965, bottom=0.168, hspace=0.42, wspace=0.2)
    for column, (world, title) in enumerate(WORLDS.items()):
        here = [row for row in rows if row.get("world") == world]
        _frontier(axes[0, column], here, title)
        _distance(axes[1, column], here)
        _effective(axes[2, column], here)
        if column:
            for line in axes[:, column]:
                line.set_ylabel("")
    _key(figure)
    return figure


def _frontier(axes: Axes, rows: list[Row], title: str) -> None:
    tidy(axes, title=title, x="KL(π‖ref), nats", y="reward gained over the reference")
    optima = sorted((row for row in rows if row["part"] == "frontier"), key=lambda row: row["kl"])
    axes.plot([row["kl"] for row in optima], [row["gain"] for row in optima], color=INK, linewidth=2.4, alpha=0.25)
    for name in SHOWN:
        mine = [row for row in _first(rows, name) if not row["diverged"]]
        style = _style(name) | {"linestyle": "none", "markersize": 3.6}
        axes.plot([row["kl"] for row in mine], [row["gain"] for row in mine], **style)
    for name in SHOWN:
        for row in rows:
            if row["part"] == "sampled" and row["estimator"] == name and row["beta"] <= 10:
                bars: dict[str, Any] = {
                    "xerr": [[row["kl"] - row["kl_low"]], [row["kl_high"] - row["kl"]]],
                    "yerr": [[row["gain"] - row["gain_low"]], [row["gain_high"] - row["gain"]]],
                }
                axes.errorbar(
                    row["kl"], row["gain"], **bars, color=look(name).colour, linewidth=0.7, alpha=0.75, capsize=1.2
                )
    axes.set(xscale="log", xlim=(0.01, 7))
    axes.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    if optima and title == WORLDS["bandit"]:
        at = min(optima, key=lambda row: abs(np.log(row["kl"] / 0.25)))
        axes.annotate("all optima π*(β')", (at["kl"], at["gain"]), (-12, 16), textcoords="offset points", ha="right",
                      size=6.2, arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.5})  # fmt: skip


def _distance(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, x="coefficient β", y="KL(π‖π*) at the end, nats")
    for name in SHOWN:
        mine = _first(rows, name)
        # A run that diverged ended nowhere: the line has a gap there.
        ends = [np.nan if row["diverged"] else max(row["kl_to_optimum"], SMALLEST) for row in mine]
        axes.plot([row["beta"] for row in mine], ends, **_style(name))
        foreseen = [row for row in mine if row.get("predicted_kl_to_optimum", 0.0) > SMALLEST]
        options: dict[str, Any] = {
            "linestyle": "none",
            "marker": "o",
            "markersize": 6,
            "markerfacecolor": "none",
            "alpha": 0.8,
        }
        axes.plot([row["beta"] for row in foreseen], [row["predicted_kl_to_optimum"] for row in foreseen],
                  color=look(name).colour, markeredgewidth=0.5, **options)  # fmt: skip
    axes.set(xscale="log", yscale="log", ylim=(SMALLEST / 2, 30))
    axes.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1], ["0", "10⁻⁶", "10⁻⁴", "0.01", "1"])
    axes.minorticks_off()


def _effective(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, x="coefficient β", y="effective β' / β, by the same KL")
    axes.axhline(1.0, color=INK, linewidth=2.4, alpha=0.25)
    for name in SHOWN:
        mine = [row for row in rows if row["part"] == "exact" and row["estimator"] == name]
        x, low, middle, high = [], [], [], []
        for beta in sorted({row["beta"] for row in mine}):
            found = [_factor(row) for row in mine if row["beta"] == beta and not row["diverged"]]
            known = [factor for factor in found if factor is not None] or [np.nan]
            x.append(beta)
            low.append(min(known))
            middle.append(float(np.exp(np.mean(np.log(known)))))
            high.append(max(known))
        axes.plot(x, middle, **_style(name))
        axes.fill_between(x, low, high, color=look(name).colour, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", ylim=(0.01, 12))
    ticks = (0.01, 0.03, 0.1, 1 / 3, 1, 3, 10)
    axes.set_yticks(ticks, ["0.01", "0.03", "0.1", "⅓", "1", "3", "10"])
    axes.minorticks_off()


def _factor(row: Row) -> float | None:
    """Of the fixed point where it is known, since it needs no training; else of where training ended."""
    coefficient = row.get("predicted_coefficient", row.get("coefficient_by_kl"))
    return None if coefficient is None else coefficient / row["beta"]


def _first(rows: list[Row], name: str) -> list[Row]:
    """One world of each kind, from small β to large."""
    mine = [row for row in rows if row["part"] == "exact" and (row["estimator"], row["seed"]) == (name, 0)]
    return sorted(mine, key=lambda row: row["beta"])


def _style(name: str) -> dict[str, Any]:
    return look(name).plot(markersize=2.8, linewidth=1.0, alpha=0.9)


def _key(figure: Figure) -> None:
    lines = [Line2D([], [], **_style(name)) for name in SHOWN]
    figure.legend(lines, list(SHOWN.values()), loc="lower center", ncols=3, frameon=False, fontsize=6.4,
                  bbox_to_anchor=(0.5, 0.04), handlelength=2.6)  # fmt: skip
    figure.text(0.5, 0.008, "\n".join(NOTES), ha="center", size=6.0)
