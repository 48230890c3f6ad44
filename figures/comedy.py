"""Bias and noise of KL gradients by length, near the reference and away from it; where the order changes.

Reads comedy/comedy.json among the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import FAINT, INK, PAGE_WIDTH, look, tidy

Row = dict[str, Any]

# Estimator and placement as computed, and the registered name whose look they share.
SHOWN = (
    (("k1-loss", "loss"), "k1-loss", "k1 in loss"),
    (("k1-loss", "reward"), "k1-reward", "k1 in reward"),
    (("k3-loss", "loss"), "k3-loss", "k3 in loss"),
    (("k3-loss", "reward"), "k3-reward", "k3 in reward"),
    (("k3-loss", "both"), "k3-both", "k3 in both"),
)


def draw(results: Path) -> Figure:
    """Bias over noise, near and far; one pair at all lengths over the distance of equal noise."""
    rows = json.loads((results / "comedy" / "comedy.json").read_text())
    figure = Figure(figsize=(PAGE_WIDTH, 4.5))
    panels = figure.subplots(2, 3)
    held = [row for row in rows if row["part"] == "length" and row["hold"] == "kl" and row["seed"] == 0]
    levels = sorted({row["kl"] for row in held})
    for column, kl in enumerate((levels[0], levels[-1]) if levels else ()):
        here = [row for row in held if row["kl"] == kl]
        side = ("near", "far")[column]
        title = f"{'ab'[column]}  Bias, {side}: KL {kl:g}"
        _lines(panels[0, column], here, "bias", title, "bias / ‖∇KL‖")
        title = f"{'de'[column]}  Noise, {side}: KL {kl:g}"
        _lines(panels[1, column], here, "std", title, "standard deviation / ‖∇KL‖")
        panels[0, column].set_ylim(-0.1, 2.6)
    _one_pair(panels[0, 2], [row for row in rows if row["part"] == "length" and row["hold"] == "pair"])
    _equal(panels[1, 2], [row for row in rows if row["part"] == "order"])
    handles = [figure.axes[0].plot([], [], **look(name).plot(), label=label)[0] for _, name, label in SHOWN]
    figure.legend(handles=handles, loc="lower center", ncols=5, frameon=False, fontsize=7, handlelength=2.6)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.94, bottom=0.155, wspace=0.3, hspace=0.42)
    return figure


def _lines(axes: Axes, rows: list[Row], quantity: str, title: str, y: str) -> None:
    """Exact lines; where samples were drawn, what they say, with two standard errors."""
    tidy(axes, title=title, x="length T (tokens)", y=y)
    for which, name, _ in SHOWN:
        mine = sorted((r for r in rows if (r["estimator"], r["placement"]) == which), key=lambda row: row["length"])
        style = look(name).plot()
        axes.plot([row["length"] for row in mine], [row[quantity] for row in mine], **{**style, "marker": ""})
        drawn = [row for row in mine if row["z_mean"] is not None]
        axes.errorbar(
            [row["length"] for row in drawn],
            [row[f"sampled_{quantity}"] for row in drawn],
            [2 * row[f"sampled_{quantity}_error"] for row in drawn],
            fmt=style["marker"], color=style["color"], markersize=3.2, elinewidth=0.7, capsize=1.2, capthick=0.6,
            markerfacecolor="white", markeredgewidth=0.7,
        )  # fmt: skip
    if quantity == "bias":
        axes.axhline(0, color=INK, lw=0.6)
        if _published(rows):
            note = "lines: exact\nmarks: 200 × 1,000 rollouts,\n± 2 standard errors"
            axes.text(0.97, 0.98, note, transform=axes.transAxes, ha="right", va="top", size=6, color=FAINT)
    else:
        axes.set(yscale="log", ylim=(0.2, 8), yticks=(0.2, 0.5, 1, 2, 5))
        axes.set_yticklabels(["0.2", "0.5", "1", "2", "5"])
        axes.minorticks_off()


def _published(rows: list[Row]) -> bool:
    return any(row["z_mean"] is not None and (row["batches"], row["samples"]) == (200, 1000) for row in rows)


def _one_pair(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="c  One pair: the order flips", x="length T (tokens)", y="standard deviation / ‖∇KL‖")
    if not rows:
        return
    furthest = max(row["kl"] for row in rows)
    for which, name, label in SHOWN[:2]:
        mine = sorted(
            (r for r in rows if (r["estimator"], r["placement"], r["kl"], r["seed"]) == (*which, furthest, 0)),
            key=lambda row: row["length"],
        )
        axes.plot([row["length"] for row in mine], [row["std"] for row in mine], **look(name).plot())
        end = mine[-1] if name == "k1-reward" else mine[0]
        side = {"ha": "right", "xytext": (0, 5)} if name == "k1-reward" else {"ha": "left", "xytext": (6, 0)}
        axes.annotate(
            label, (end["length"], end["std"]), textcoords="offset points", size=6.5, color=look(name).colour, **side
        )
    first, last = min(rows, key=lambda row: row["length"]), max(rows, key=lambda row: row["length"])
    ends = {row["length"]: row["rollout_kl"] for row in rows if row["kl"] == furthest}
    said = "\nto ".join(f"{ends[end['length']]:.2f} at T = {end['length']}" for end in (first, last))
    axes.text(0.98, 0.8, f"KL grows from {said}", transform=axes.transAxes, ha="right", va="top", size=6, color=FAINT)


def _equal(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="f  Equally noisy at this distance", x="length T (tokens)", y="KL(π‖ref) of sequences (nats)")
    known = sorted((row["length"], row["equal_at"]) for row in rows if row["equal_at"] is not None)
    if not known:
        return
    axes.plot(*zip(*known, strict=True), color=INK, lw=1.2, marker="o", ms=2.2)
    axes.set_ylim(0, 0.85)
    middle = known[len(known) // 2][0]
    axes.text(middle, 0.64, "k1 in the reward is noisier", ha="center", size=6.5, color=look("k1-reward").colour)
    axes.text(middle, 0.16, "k1 in the loss is noisier", ha="center", size=6.5, color="#5f5f5f")
