"""Two worked examples, and bias, direction, size and sign against distance from the reference."""

from typing import Any

import numpy as np

from .style import FAINT, INK, Axes, DataFrame, Figure, label, look, panels, select, tidy

DISTANCE = "KL(π‖ref), nats"
# The steepest parts of the binary example are cut off, so that its middle can be read.
BINARY_RANGE = (-7, 7)


def draw(rows: DataFrame) -> Figure:
    """Exact throughout; bands are from the 10th to the 90th of 100 pairs of policies, lines are medians."""
    distances = select(rows, "distance", seed=0)
    figure, (binary, four, error, direction, size, signs) = panels(6, 5.7)
    _binary(binary, select(rows, "binary"))
    _four(four, select(rows, "examples", example="four actions").set_index("estimator"))
    _error(error, distances)
    _direction(direction, distances)
    _size(size, distances)
    _signs(signs, distances)
    return figure


def _binary(axes: Axes, rows: DataFrame) -> None:
    axes.axvline(0.5, color=FAINT, lw=0.6, ls=":")
    axes.text(0.5, 6.9, "ref ", ha="right", va="top", color=FAINT)
    for name in ("k1-loss", "k3-loss", "k3-reward", "k2-loss"):
        mine = select(rows, estimator=name)
        style = look(name).plot(marker="", linewidth=1.8 if name == "k2-loss" else 1.1)
        axes.plot(mine["probability"], mine["derivative"], **style)
        for derivative in select(mine, probability=0.8)["derivative"]:
            axes.plot([0.8], [derivative], **look(name).plot(linestyle=""))
    texts = {
        "k1-loss": (0.54, -2.1, "left", "k₁ in\nthe loss"),
        "k2-loss": (0.47, -5.2, "left", "truth = k₂\nin the loss"),
        "k3-loss": (0.86, 4.6, "right", "k₃ in the loss"),
        "k3-reward": (0.13, 4.6, "left", "k₃ in the reward"),
    }
    for name, (x, y, side, text) in texts.items():
        axes.text(x, y, text, ha=side, color=look(name).colour, weight="bold")
    axes.set(xlim=(0, 1), ylim=BINARY_RANGE)
    tidy(axes, title="a  Two actions", x="probability p of the first action", y="expected gradient, d/dp")


def _four(axes: Axes, rows: DataFrame) -> None:
    truth, wrong = rows.loc["k3-loss", ["truth", "gradient"]]
    across = np.arange(len(truth))
    axes.bar(across - 0.19, truth, 0.36, color=INK)
    axes.bar(across + 0.19, wrong, 0.36, color=look("k3-loss").colour, hatch="////", edgecolor="white", linewidth=0)
    axes.axhline(0, color=INK, lw=0.6)
    axes.text(0.5, 0.335, "truth", color=INK, weight="bold", va="center")
    axes.text(0.5, 0.275, "k₃ in the loss", color=look("k3-loss").colour, weight="bold", va="center")
    label(axes, "another sign", (1.19, wrong[1]), (0, 4), ha="left")
    labels = [f"{p:.1f}\n{r:.1f}" for p, r in zip((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4), strict=True)]
    axes.set_xticks(across, labels)
    axes.text(-0.62, -0.362, "π\nref", ha="right", va="top")
    axes.set(ylim=(-0.34, 0.41))
    tidy(axes, title="b  Four actions", y="expected gradient, by logit")


def _error(axes: Axes, rows: DataFrame) -> None:
    x, _ = _line(axes, rows, "k3-loss", "relative_error", 128, scale="log")
    axes.plot(x, np.sqrt(x), color=FAINT, lw=0.8, ls=(0, (1, 1.5)))
    mine = _of(rows, "k3-reward", 128)
    axes.plot(mine["kl"], mine["size"], **look("k3-reward").plot(linestyle="", mfc="none", markersize=4.5))
    for name, x, y, text in (
        ("k3-loss", 1e-3, 2.6e-3, "k₃ in the loss:\nerror / ‖∇KL‖"),
        ("k3-reward", 1.4e-6, 0.22, "k₃ in the reward:\nsize / ‖∇KL‖"),
    ):
        axes.text(x, y, text, color=look(name).colour, weight="bold", va="center")
    label(axes, "√KL", (0.9, 1.0), (-3, 0), FAINT, ha="right")
    tidy(axes, title="c  Error, V = 128", x=DISTANCE, y="relative to the truth")


def _direction(axes: Axes, rows: DataFrame) -> None:
    axes.axhline(1, color=INK, lw=0.8)
    texts = {
        "k3-loss": (3e-4, 1.09, "k₃ in the loss"),
        "abs-loss": (2e-6, 0.69, "|u| in the loss"),
        "k3-reward": (2e-6, 0.10, "k₃ in the reward"),
    }
    for name, (x, y, text) in texts.items():
        _line(axes, rows, name, "cosine", 128)
        axes.text(x, y, text, color=look(name).colour, weight="bold", va="center")
    axes.text(2e-6, 1.09, "truth", weight="bold", va="center")
    axes.set(ylim=(-0.62, 1.22))
    axes.set_yticks((-0.5, 0, 0.5, 1))
    tidy(axes, title="d  Direction, V = 128", x=DISTANCE, y="cosine with ∇KL")


def _size(axes: Axes, rows: DataFrame) -> None:
    axes.axhline(1, color=INK, lw=0.8)
    axes.text(1e-6, 1.06, "truth", weight="bold", va="bottom")
    for path, line, (x, y), words in (
        ("dropped", "-", (5e-3, 2.6), "a likely action\ndropped"),
        ("random", "--", (3.5, 2.9), "random\npolicy"),
        ("taken up", ":", (4e-4, 0.30), "an unlikely\naction\ntaken up"),
    ):
        _line(axes, rows, "k3-loss", "size", 128, path=path, scale="log", linestyle=line)
        axes.text(x, y, words, ha="right", va="center", color=look("k3-loss").colour)
    axes.set(ylim=(0.14, 7))
    axes.set_yticks((0.2, 0.5, 1, 2, 5), ("0.2", "0.5", "1", "2", "5"))
    axes.minorticks_off()
    tidy(axes, title="e  Size of k₃ in the loss, V = 128", x=DISTANCE, y="‖E[ĝ]‖ / ‖∇KL‖")


def _signs(axes: Axes, rows: DataFrame) -> None:
    # One estimator, at growing vocabularies.
    for size, line, (x, y) in (
        (2, ":", (0.7, 0.05)),
        (4, "-.", (0.012, 0.2)),
        (32, "--", (0.035, 0.7)),
        (128, "-", (1.2e-6, 0.62)),
    ):
        mine = _reached(_of(rows, "k3-loss", size))
        style = look("k3-loss").plot(linestyle=line, mfc="white")
        axes.plot(mine["kl"], mine["any_flipped"], **style)
        axes.text(x, y, f"V = {size}", color=look("k3-loss").colour, weight="bold")
    axes.set(xscale="log", ylim=(-0.05, 1.08))
    tidy(axes, title="f  k₃ in the loss turns a sign", x=DISTANCE, y="share of policies")


def _line(
    axes: Axes,
    rows: DataFrame,
    estimator: str,
    quantity: str,
    size: int,
    path: str = "random",
    scale: str = "linear",
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The median with its band, where at least half of the pairs get so far."""
    mine = _reached(_of(rows, estimator, size, path)).dropna(subset=[quantity])
    columns = ("kl", quantity, f"{quantity}_low", f"{quantity}_high")
    x, y, low, high = (mine[name].to_numpy(float) for name in columns)
    style = look(estimator).plot(markevery=0.3, **options)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(x, y, **style)
    axes.set(xscale="log", yscale=scale)
    return x, y


def _of(rows: DataFrame, estimator: str, size: int, path: str = "random") -> DataFrame:
    return select(rows, estimator=estimator, vocabulary=size, path=path)


def _reached(rows: DataFrame) -> DataFrame:
    return rows[rows["reached"] >= 0.5 * rows["pairs"]]
