"""Where noisy training settles against the batch size: bias from the fixed point, and noise that may cancel.

Reads coefficients/coefficients.json among the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import PAGE_WIDTH, look, tidy

READS = ("coefficients",)
Row = dict[str, Any]
PANELS = {
    "a  Unbiased: noise alone": {
        "k1-both": "k1 in both places",
        "rao-blackwell": "Rao–Blackwell",
        "k1-reward": "k1 in the reward",
        "leave-one-out": "k1 less the others' mean",
    },
    "b  Biased against unbiased": {
        "k1-both": "k1 in both places",
        "rao-blackwell": "Rao–Blackwell",
        "k3-loss": "token k3, biased",
        "k2-loss": "token k2, biased",
    },
}
BELOW = ("k2-loss",)  # whose label would hide another's
SILENT = 1e-20  # rounding: noise that is zero, for which a logarithmic axis has no place


def draw(results: Path) -> Figure:
    rows = json.loads((results / "coefficients" / "coefficients.json").read_text())
    budget = [row for row in rows if row["part"] == "budget" and row["seed"] == 0]
    figure = Figure(figsize=(PAGE_WIDTH, 2.7), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (title, names) in zip(panels, PANELS.items(), strict=True):
        _panel(axes, budget, title, names)
    notes = ((0.3, "lines: η·tr Cov/(4βB), no fit; zero for the lowest\nbars: two standard errors"),
             (0.04, "lines: the fixed point's\nKL(π‖π*), and noise"))  # fmt: skip
    for axes, (height, words) in zip(panels, notes, strict=True):
        axes.text(0.03, height, words, size=6.2, transform=axes.transAxes)
    return figure


def _panel(axes: Axes, rows: list[Row], title: str, names: dict[str, str]) -> None:
    tidy(axes, title=title, x="rollouts per update B", y="KL(π‖π*) where training settles, nats")
    sizes = sorted({row["batch_size"] for row in rows})
    for name, words in names.items():
        mine = sorted((row for row in rows if row["estimator"] == name), key=lambda row: row["batch_size"])
        if not mine:
            continue
        x, y = [row["batch_size"] for row in mine], [row["kl_to_optimum"] for row in mine]
        # A bar that would reach zero ends at a tenth of the mean.
        errors = [
            [min(2 * row["standard_error"], 0.9 * row["kl_to_optimum"]) for row in mine],
            [2 * row["standard_error"] for row in mine],
        ]
        style = look(name).plot(linestyle="none", markersize=4)
        axes.errorbar(x, y, errors, capsize=1.5, elinewidth=0.7, **style)
        foreseen = [_foreseen(row) for row in mine]
        if min(foreseen) > SILENT:
            axes.plot(x, foreseen, color=look(name).colour, linestyle=look(name).line, linewidth=1.0)
        axes.annotate(
            words,
            (x[-1], y[-1]),
            (6, -11 if name in BELOW else -2),
            textcoords="offset points",
            size=6.4,
            color=look(name).colour,
        )
    axes.set(xscale="log", yscale="log")
    if sizes:
        axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 2.9)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()


def _foreseen(row: Row) -> float:
    """KL(fixed point‖π*) + η·tr Cov/(4βB), at β = 1."""
    return row["predicted_bias"] + row["learning_rate"] * row["noise"] / (4 * row["batch_size"])
