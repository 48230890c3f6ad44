"""A language model under each KL term: gold score along training, and what is lost against k₁ in the reward.

Reads the committed sweep in finetune/finetune.json among the results.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy.stats import t

from .style import FAINT, INK, Axes, DataFrame, Figure, label, look, panels, select, tidy

WORDS = {
    **{name: look(name).words for name in ("none", "k1-loss", "k2-loss", "k3-loss", "k1-reward", "leave-one-out")},
    "stale:k1-reward-sequence-ratio": "k₁, sequence ratio",
    "stale:k1-reward-to-go-prefix-ratio": "k₁, prefix ratios",
    "stale:k2-loss": "k₂ in the loss",
    "stale:k3-ratio": "k₃ with a ratio",
}
# Variants that others are compared with: fresh, and with a stale sampler.
BEST = ("k1-reward", "stale:k1-reward-to-go-prefix-ratio")
# Its objective is lower by whole units.
OFF_SCALE = "k1-loss"
FRESH = [variant for variant in WORDS if not variant.startswith("stale:")]
NATS = [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    rows = select(rows, "committed")
    figure, (gold, lost) = panels(2, 2.5)
    along(gold, rows, "gold_held_out", "a  What is meant", "gold score, held-out")
    gold.set_ylim(top=1.05)
    gold.legend(loc="upper left", ncols=2)
    last = rows[rows["update"] == rows["update"].max()]
    _lost(lost, last.assign(objective=last["reward_held_out"] - last["beta"] * last["kl"]))
    return figure


def along(axes: Axes, rows: DataFrame, name: str, title: str, what: str) -> None:
    """Means over seeds at each evaluation, against the mean KL there, at the least β; a larger mark at the end."""
    beta = min((one for one in rows["beta"].unique() if one), default=0.0)
    rows = rows[rows["beta"].isin((0.0, beta))]
    tidy(axes, title=f"{title}, β = {beta:g}", x="KL(π‖ref), nats", y=what)
    axes.set_xscale("log")
    nats(axes.xaxis)
    for variant in FRESH:
        found = select(rows, variant=variant)
        if not len(found):
            continue
        means = found[found["update"] > 0].groupby("update")[["kl", name]].mean()
        style = style_of(variant)
        axes.plot(means["kl"], means[name], label=WORDS[variant], **style)
        axes.plot(means["kl"].iloc[-1:], means[name].iloc[-1:], **{**style, "markersize": 6})
    start = select(rows, update=0)[name].mean()
    axes.axhline(start, color=FAINT, linewidth=0.6)
    label(axes, "reference", (1, start), (-2, 2), FAINT, xycoords=("axes fraction", "data"), ha="right")


def _lost(axes: Axes, last: DataFrame) -> None:
    tidy(axes, title="b  What is lost", x="objective, difference", y="penalty, β")
    lines = [
        (variant, beta)
        for variant in WORDS
        for beta in sorted(select(last, variant=variant)["beta"].unique())
        if beta and variant not in (*BEST, OFF_SCALE)
    ]
    for row, (variant, beta) in enumerate(lines):
        best = BEST[variant.startswith("stale:")]
        ours, theirs = (select(last, variant=one, beta=beta).set_index("seed")["objective"] for one in (variant, best))
        mean, reach = _interval(ours - theirs)
        axes.errorbar(mean, -row, xerr=reach, **{**style_of(variant), "linestyle": ""}, elinewidth=0.8, capsize=1.5)
    names = [f"{'stale: ' * variant.startswith('stale:')}{WORDS[variant]}, {beta:g}" for variant, beta in lines]
    axes.set_yticks([-row for row in range(len(lines))], names)
    axes.axvline(0, color=INK, linewidth=0.6)


def nats(axis: Any) -> None:
    """Set ticks of KL at round numbers of nats."""
    axis.set_major_locator(FixedLocator(NATS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _interval(values: pd.Series) -> tuple[float, float]:
    """A mean over seeds, and how far its 95 % interval (Student's t) reaches."""
    known = values.dropna()
    reach = t.ppf(0.975, max(len(known) - 1, 1)) * known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else 0.0
    return float(known.mean()), float(reach)


def style_of(variant: str) -> dict[str, Any]:
    """Return the look of a variant: hollow and dashed with a stale sampler."""
    stale, _, term = variant.rpartition(":")
    if term == "none":
        return look(term).plot(color=INK, linestyle=":", marker="*")
    if term == "leave-one-out":
        return look(term).plot(fillstyle="left", markerfacecoloralt="white")
    return look(term).plot(**({"linestyle": "--", "markerfacecolor": "white"} if stale else {}))
