"""Exact next-token KLs at some positions alone: in random environments, and in a language model."""

import numpy as np

from .style import FAINT, INK, Axes, DataFrame, Figure, label, look, note, panels, select, tidy

READS = ("variance",)
# A rule of choice, the look of an estimator, and words.
RULES = (
    ("optimal", "rao-blackwell", "-", "optimal"),
    ("variance", "k1-reward", "--", "Var(u | s)"),
    ("entropy", "k3-loss", ":", "entropy"),
)
SPREAD = 4.0


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (random, language) = panels(2, 2.4)
    _random(random, select(rows, "budget", spread=SPREAD, of="gradient"))
    _language(language, select(rows, "language", what="training"))
    return figure


def _random(axes: Axes, rows: DataFrame) -> None:
    words = "of what they can remove (%)"
    tidy(axes, title="a  Sure random policies: gradient", x="positions with an exact KL (%)", y=words)
    axes.plot([0, 50], [0, 50], color=FAINT, linewidth=0.6, linestyle=":")
    axes.set(xlim=(0, 51), ylim=(0, 103))
    for rule, like, line, words in RULES:
        mean = select(rows, rule=rule).groupby("share")["removed"].mean()
        shares, removed = np.append(0, 100 * mean.index), np.append(0, 100 * mean)
        axes.plot(shares, removed, label=words, **look(like).plot(linestyle=line))
    axes.legend(loc="lower right")
    label(axes, "at random", (18, 18), (4, -7), FAINT)


def _language(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  A language model in training", x="updates", y="exact KLs remove (%)")
    lines = (("", "rao-blackwell", "the KL’s estimate"), ("objective_", "k3-loss", "objective R − β·KL"))
    for column, like, words in lines:
        ratio = rows[f"{column}exact"] / rows[f"{column}sampled"]
        by = (100 * (1 - ratio)).groupby(rows["update"])
        axes.errorbar(by.mean().index, by.mean(), 2 * by.sem(), elinewidth=0.6, label=words, **look(like).plot())
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set(ylim=(-105, 105), xlim=(0, None))
    axes.legend(loc="upper right")
    note(axes, 0.03, 0.03, "below 0: they add noise", color=INK)
