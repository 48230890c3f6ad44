"""A language model under each KL term, with rollouts of free and of fixed length: what is reached at which KL.

Reads the recorded runs in finetune/finetune.json among the results.
"""

import itertools
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .style import FAINT, INK, Axes, DataFrame, Figure, look, panels, select, tidy

# Terms with fresh rollouts, as in the experiment; the first one with a coefficient follows the true gradient.
TERMS = {
    "none": look("none").words,
    "leave-one-out": "k₁ in the reward",
    "k2-loss": look("k2-loss").words,
    "k3-loss": look("k3-loss").words,
    "k1-loss": look("k1-loss").words,
}
TASKS = ("free", "fixed")
METRICS = {"reward_held_out": "reward, held-out", "gold_held_out": "gold score, held-out"}
NATS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    ends = at_ends(rows)
    figure, places = panels(4, 4.4)
    for axes, letter, (name, task) in zip(places, "abcd", itertools.product(METRICS, TASKS), strict=True):
        tidy(axes, title=f"{letter}  {task.capitalize()} length", x="KL(π‖ref), nats", y=METRICS[name])
        _frontiers(axes, select(ends, task=task), name)
    places[3].sharey(places[2])
    places[3].legend(*places[0].get_legend_handles_labels(), loc="upper right")
    return figure


def at_ends(rows: DataFrame) -> DataFrame:
    """Return the last row of each recorded run, with what was measured before its first update."""
    runs, found = ["task", "variant", "beta", "seed"], select(rows, "committed")
    first, last = (found[found["update"] == update] for update in (found["update"].min(), found["update"].max()))
    return last.merge(first[[*runs, *METRICS]], on=runs, suffixes=("", "_before"))


def _frontiers(axes: Axes, ends: DataFrame, name: str) -> None:
    """Every run as a point, and the means over seeds at each coefficient as a line, from small β on the right."""
    axes.set_xscale("log")
    nats(axes.xaxis)
    for term in TERMS:
        own = select(ends, variant=term)
        if not len(own):
            continue
        style = style_of(term)
        axes.plot(own["kl"], own[name], **{**style, "linestyle": "", "markersize": 1.6, "alpha": 0.45})
        by = own.groupby("beta")
        kl = by["kl"].agg(lambda values: np.exp(np.log(values).mean()))
        axes.plot(kl, by[name].mean(), label=TERMS[term], **style)
    axes.axhline(ends[f"{name}_before"].mean(), color=FAINT, linewidth=0.6)


def nats(axis: Any) -> None:
    """Set ticks of KL at round numbers of nats."""
    axis.set_major_locator(FixedLocator(NATS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def style_of(term: str) -> dict[str, Any]:
    """Return the look of a term."""
    if term == "none":
        return look(term).plot(color=INK, linestyle="", marker="*", markersize=6)
    if term == "k1-loss":  # no frontier: how far it goes is chance
        return look(term).plot(linestyle="")
    return look("k1-reward" if term == "leave-one-out" else term).plot()
