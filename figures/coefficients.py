"""Effects of a coefficient: reward against KL beside all optima, and the effective coefficient."""

from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from .style import INK, PAGE_WIDTH, Axes, DataFrame, Figure, look, select, tidy

ENVIRONMENTS = {"bandit": "bandit", "sequence": "sequences of 3 tokens", "mdp": "MDP, 3 steps"}
# One of each kind, and what is said beside its name; the table of the experiment has all.
SHOWN = {
    "k1-reward": " (or others along ∇KL)",
    "k2-loss": " (local gradient)",
    "k3-loss": " (GRPO)",
    "length-normalised": "",
    "last-token": "",
}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure = Figure(figsize=(PAGE_WIDTH, 3.9))
    axes = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.092, right=0.985, top=0.95, bottom=0.215, hspace=0.42, wspace=0.22)
    for column, (environment, title) in enumerate(ENVIRONMENTS.items()):
        here = select(rows, environment=environment)
        _frontier(axes[0, column], here, title)
        _effective(axes[1, column], here)
        if column:
            for line in axes[:, column]:
                line.set_ylabel("")
    key(figure, 0.0)
    return figure


def _frontier(axes: Axes, rows: DataFrame, title: str) -> None:
    tidy(axes, title=title, x="KL(π‖ref), nats", y="reward gained")
    optima = select(rows, "frontier").sort_values("kl")
    axes.plot(optima["kl"], optima["gain"], color=INK, linewidth=2.4, alpha=0.25)
    for name in SHOWN:
        mine = first(rows, name)
        mine = mine[mine["diverged"] == 0]
        axes.plot(mine["kl"], mine["gain"], **style_of(name) | {"linestyle": "none", "markersize": 3.6})
    axes.set(xscale="log", xlim=(0.01, 7))
    axes.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])


def _effective(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, x="coefficient β", y="effective β' / β")
    axes.axhline(1.0, color=INK, linewidth=2.4, alpha=0.25)
    for name in SHOWN:
        mine = select(rows, "exact", estimator=name)
        # That of the fixed point if it is known, since it needs no training; else of where training ended.
        coefficient = mine["predicted_coefficient"].fillna(mine["coefficient_by_kl"]).astype(float)
        factor = (coefficient / mine["beta"]).where(mine["diverged"] == 0)
        found = np.log(factor).groupby(mine["beta"]).agg(["min", "mean", "max"]).map(np.exp)
        axes.plot(found.index, found["mean"], **style_of(name))
        axes.fill_between(found.index, found["min"], found["max"], color=look(name).colour, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", ylim=(0.01, 12))
    ticks = (0.01, 0.03, 0.1, 1 / 3, 1, 3, 10)
    axes.set_yticks(ticks, ["0.01", "0.03", "0.1", "1/3", "1", "3", "10"])
    axes.minorticks_off()


def first(rows: DataFrame, name: str) -> DataFrame:
    """One environment of each kind, from small β to large."""
    return select(rows, "exact", estimator=name, seed=0).sort_values("beta")


def style_of(name: str) -> dict[str, Any]:
    """Return the look of an estimator's points."""
    return look(name).plot(markersize=2.8, linewidth=1.0, alpha=0.9)


def key(figure: Figure, above: float) -> None:
    """Name the estimators, `above` the lower edge of the figure by this share of its height."""
    lines = [Line2D([], [], **style_of(name)) for name in SHOWN]
    words = [look(name).words + more for name, more in SHOWN.items()]
    figure.legend(lines, words, loc="lower center", ncols=3, bbox_to_anchor=(0.5, above), handlelength=2.4)
