"""Noise of unbiased KL gradients: where Rao–Blackwell loses, how often, what a baseline does, what is left to gain.

Reads variance/variance.json among the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import FAINT, INK, PAGE_WIDTH, look, tidy

Row = dict[str, Any]

PUBLISHED, RATE, NOISE = 0.25, 10.0, 1.0
# Of the estimators computed: the look of a registered one, and how it is called here.
STEPS = (
    ("return", "k1-reward", "k1, whole return"),
    ("to go", "k1-reward-to-go", "k1 to go"),
    ("k3 in both, to go", "k3-both", "k3 in both, to go"),
    ("rao-blackwell", "rao-blackwell", "Rao–Blackwell"),
    ("rao-blackwell, one baseline", "lambda-baseline", "RB, one baseline"),
    ("to go, critic", "k1-reward-immediate", "k1, critic"),
    ("rao-blackwell, critic", "full-loss", "RB, critic"),
)
PARTS = (
    ("visits", "#0b3c66", "which prefixes"),
    ("token", "#f5b26b", "this token"),
    ("future", "#fde0b8", "later ones"),
)
# λ or its rule, and its look.
RULES = (("0", "k1-reward"), ("value", "k3-reward"), ("1", "k3-both"), ("gradient", "rao-blackwell"))


def draw(results: Path) -> Figure:
    """The pair, rates of failure and the bandit over its training, the ladder by length and its parts."""
    rows = json.loads((results / "variance" / "variance.json").read_text())
    figure = Figure(figsize=(PAGE_WIDTH, 4.7))
    edges = {"left": 0.062, "right": 0.99}
    top = figure.add_gridspec(1, 3, top=0.945, bottom=0.6, wspace=0.3, **edges)
    bottom = figure.add_gridspec(1, 3, top=0.44, bottom=0.095, wspace=0.42, width_ratios=(1, 1.35, 0.95), **edges)
    panels = [figure.add_subplot(row[0, column]) for row in (top, bottom) for column in range(3)]
    part = {
        name: [row for row in rows if row["part"] == name] for name in ("pair", "rates", "noise", "bandit", "ladder")
    }
    _pair(panels[0], part["pair"])
    _rates(panels[1], part["rates"])
    _noise(panels[2], part["noise"])
    _bandit(panels[3], [row for row in part["bandit"] if row["what"] == "path" and row["rate"] == RATE])
    ladder = [row for row in part["ladder"] if row["distance"] == NOISE and row["seed"] == 0]
    _ladder(panels[4], ladder)
    _parts(panels[5], ladder)
    return figure


def _pair(axes: Axes, rows: list[Row]) -> None:
    tidy(
        axes,
        title="a  Two tokens: RB can lose",
        x="ref's chance of 0 at first",
        y="variance of the KL estimate (nats²)",
    )
    rows = sorted(rows, key=lambda row: row["reference"])
    lines = (("monte_carlo", "k1-reward", "-"), ("rao_blackwell", "rao-blackwell", "-"), ("mixture", "truth", ":"))
    for name, like, line in lines:
        style = look(like).plot(marker="", linestyle=line)
        axes.plot([row["reference"] for row in rows], [row[name] for row in rows], **style)
        for row in rows:
            if row["reference"] == PUBLISHED and name != "mixture":
                axes.plot([PUBLISHED], [row[name]], "o", color=style["color"], ms=4)
                axes.annotate(
                    f"{row[name]:.2f}", (PUBLISHED, row[name]), (-3, 5 if name == "rao_blackwell" else 4),
                    textcoords="offset points", size=6.5, color=style["color"], ha="right",
                )  # fmt: skip
    axes.set(ylim=(0, 12), xlim=(0, 1))
    axes.text(0.84, 10.9, "sampled (k1)", ha="right", size=6.5, color=look("k1-reward").colour)
    axes.text(0.9, 5.35, "RB", size=6.5, color=look("rao-blackwell").colour)
    axes.text(0.57, 2.6, "best mixture", size=6.5, color=INK, ha="center")


def _rates(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="b  At random: how often RB loses", x="logit noise between π and ref", y="share of worlds (%)")
    for spread, like in ((4.0, "rao-blackwell"), (1.0, "k1-reward")):
        for column, line, marker in (("value", "-", "o"), ("gradient", "--", "s")):
            by: dict[float, list[Row]] = {}
            for row in rows:
                if row["spread"] == spread:
                    by.setdefault(row["distance"], []).append(row)
            x = sorted(by)
            y = [100 * sum(r[f"{column}_fails"] for r in by[at]) / sum(r["worlds"] for r in by[at]) for at in x]
            axes.plot(x, y, **look(like).plot(linestyle=line, marker=marker))
    axes.set(xscale="log", ylim=(-0.4, 10))
    axes.text(0.1, 8.7, "sure policy (logits of spread 4)", size=6.5, color=look("rao-blackwell").colour)
    axes.text(0.1, 7.8, "mild policy (spread 1)", size=6.5, color=look("k1-reward").colour)
    axes.text(0.1, 6.6, "solid: value", size=6.5, color=INK)
    axes.text(0.1, 5.7, "dashed: gradient", size=6.5, color=INK)


def _noise(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="c  Bandit: two different best λ", x="λ in k1 + λ(w − 1)", y="variance / at λ = 0")
    rows = sorted(rows, key=lambda row: row["lam"])
    start = next((row for row in rows if row["lam"] == 0), None)
    if start is None:
        return
    for name, like, words, at in (
        ("value", "k3-reward", "value", (2.9, 1.2e3)),
        ("gradient", "rao-blackwell", "gradient", (1.9, 0.55)),
    ):
        x, y = [row["lam"] for row in rows], [row[f"{name}_variance"] / start[f"{name}_variance"] for row in rows]
        axes.plot(x, y, **look(like).plot(marker=""))
        axes.text(*at, words, size=6.5, color=look(like).colour, ha="center")
        best = start[f"least_noisy_{name}"]
        axes.axvline(best, color=look(like).colour, lw=0.7, ls=":")
    axes.axhline(1, color=INK, lw=0.5)
    axes.set(yscale="log", ylim=(0.1, 2e4))
    axes.annotate(
        "k3", (1, next(row["value_variance"] for row in rows if row["lam"] == 1) / start["value_variance"]),
        (0, 4), textcoords="offset points", size=6.5, ha="center", color=FAINT,
    )  # fmt: skip


def _bandit(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title=f"d  Bandit: training, rate {RATE:g}", x="update", y="KL(π‖ref) (nats)")
    for rule, like in RULES:
        mine = sorted((row for row in rows if row["rule"] == rule), key=lambda row: row["step"])
        if not mine:
            continue
        style = look(like).plot(marker="")
        x = [row["step"] for row in mine]
        axes.fill_between(
            x, [r["low"] for r in mine], [r["high"] for r in mine], color=style["color"], alpha=0.15, lw=0
        )
        axes.plot(x, [row["kl"] for row in mine], **style)
    axes.set(ylim=(0, 7))
    axes.text(398, 6.4, "λ = 0, and λ best for the value", ha="right", size=6.5, color=look("k1-reward").colour)
    words = "λ = 1 (k3, dashed), and\nλ best for the gradient"
    axes.text(398, 1.35, words, ha="right", size=6.5, color=look("rao-blackwell").colour)


def _ladder(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="e  How far from the least possible", x="length T (tokens)", y="variance / least possible")
    for name, like, words in STEPS:
        mine = sorted((row for row in rows if row["estimator"] == name), key=lambda row: row["length"])
        if not mine:
            continue
        axes.plot([row["length"] for row in mine], [row["over_floor"] for row in mine], **look(like).plot())
        axes.annotate(
            words, (mine[-1]["length"], mine[-1]["over_floor"]), (5, 0), textcoords="offset points", va="center",
            size=6, color=look(like).colour,
        )  # fmt: skip
    axes.axhline(1, color=INK, lw=0.8)
    axes.set(yscale="log", xlim=(1.7, 12.6), xticks=(2, 4, 6, 8), yticks=(1, 2, 5, 10, 20), ylim=(0.9, 40))
    axes.set_yticklabels(["1", "2", "5", "10", "20"])
    axes.minorticks_off()


def _parts(axes: Axes, rows: list[Row]) -> None:
    longest = max((row["length"] for row in rows), default=0)
    tidy(axes, title=f"f  What is random, T = {longest}", x="variance / ‖∇KL‖²")
    shown = [
        (words, row) for name, _, words in STEPS for row in rows if (row["estimator"], row["length"]) == (name, longest)
    ]
    for at, (_, row) in enumerate(shown):
        left = 0.0
        for part, colour, _ in PARTS:
            axes.barh(at, row[part], left=left, color=colour, height=0.7, edgecolor="white", lw=0.4)
            left += row[part]
    axes.set_yticks(range(len(shown)), [words for words, _ in shown], size=6)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles = [axes.barh(0, 0, color=colour, label=words) for _, colour, words in PARTS]
    axes.legend(
        handles=handles, loc="lower right", frameon=False, fontsize=6.5, title="left to chance", title_fontsize=6.5
    )
