"""Error against sample size, of the value and of the gradient."""

import numpy as np

from .style import FAINT, INK, Axes, DataFrame, Figure, label, look, panels, select, tidy

READS = ("differentiate-the-estimate",)
# The KL that is drawn, and the sample sizes that show the crossing.
KL, SIZES = 0.5, (1.0, 1e4)
VALUES = {"k1-loss": "k₁", "k2-loss": "k₂", "k3-loss": "k₃"}
GRADIENTS = {
    ("k1-loss", "loss"): look("k1-loss").words,
    ("k2-loss", "loss"): f"{look('k2-loss').words}, or {look('k1-reward').words}",
    ("k3-loss", "loss"): look("k3-loss").words,
    ("k3-loss", "reward"): look("k3-reward").words,
}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (values, gradients) = panels(2, 2.25)
    rows = select(rows, "gaussians", kl=KL)
    _values(values, rows)
    _gradients(gradients, rows)
    return figure


def _values(axes: Axes, rows: DataFrame) -> None:
    across = np.geomspace(*SIZES, 200)
    found = select(rows, kind="value").set_index("estimator")
    for name, words in VALUES.items():
        variance, mean = found.loc[name, ["variance", "mean"]]
        line = variance / KL**2 / across + (mean / KL - 1) ** 2
        axes.plot(across, line, label=words, **look(name).plot(markevery=0.3))
    _crossing(axes, found)
    axes.legend(loc="lower left")
    axes.set(xscale="log", yscale="log", xlim=SIZES, ymargin=0.12)
    tidy(axes, title=f"a  The value, KL = {KL:g} nats", x="samples n", y="mean squared error / KL²")


def _crossing(axes: Axes, found: DataFrame) -> None:
    """Mark the size at which k2's bias makes it as bad as k1."""
    one, two = found.loc["k1-loss"], found.loc["k2-loss"]
    size = (one["variance"] - two["variance"]) / (two["mean"] - KL) ** 2
    axes.plot([size], [one["variance"] / size / KL**2], "o", mfc="none", mec=INK, ms=7, mew=0.8)
    at = (size, one["variance"] / size / KL**2)
    label(axes, f"n* = {size:.4g}\nk₂'s bias outweighs\nk₁'s noise", at, (9, 9), ha="left", va="bottom")


def _gradients(axes: Axes, rows: DataFrame) -> None:
    across = np.geomspace(*SIZES, 200)
    axes.axhline(1.0, color=FAINT, lw=0.8, ls=(0, (1, 1.5)), label="no gradient at all")
    for (estimator, placement), words in GRADIENTS.items():
        parts = select(rows, kind="gradient", estimator=estimator, placement=placement)
        size = (parts["truth"] ** 2).sum()
        variance, bias = parts["variance"].sum() / size, ((parts["mean"] - parts["truth"]) ** 2).sum() / size
        # Rounding would draw a floor under an estimator that has none.
        line = variance / across + (bias if bias > 1e-20 else 0.0)
        name = estimator if placement == "loss" else estimator.replace("loss", placement)
        style = look(name).plot(markevery=0.3, linewidth=1.8 if bias < 1e-20 else 1.1)
        axes.plot(across, line, label=words, **style)
    axes.set(xscale="log", yscale="log", xlim=SIZES)
    axes.legend(loc="lower left")
    title = f"b  Its gradient, KL = {KL:g} nats"
    tidy(axes, title=title, x="samples n", y="mean squared error / ‖∇KL‖²")
