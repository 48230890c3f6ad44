"""Six approximations of a KL penalty: top-k heads, their drift, clamps, the way back, low precision, lengths.

Reads approximations/approximations.json among the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import FAINT, INK, PAGE_WIDTH, look, tidy

Row = dict[str, Any]
HEADS = {2: ("#e08214", "s"), 8: ("#b35806", "^"), 16: ("#7f3b08", "D")}
CLAMPED = {"color": look("k3-loss").colour, "linestyle": "--", "linewidth": 1.3}
K2, K3 = (look(name).plot(marker="") for name in ("k2-loss", "k3-loss"))
SMALL = {"textcoords": "offset points", "size": 6.2}


def draw(results: Path) -> Figure:
    rows = json.loads((results / "approximations" / "approximations.json").read_text())
    figure = Figure(figsize=(PAGE_WIDTH, 4.5), layout="constrained")
    (heads, drift, clamp), (back, precision, lengths) = figure.subplots(2, 3)
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    _heads(heads, parts.get("head", []))
    _drift(drift, [row for row in parts.get("drift", []) if row["form"] == "top-k"])
    _clamp(clamp, parts.get("clamp", []))
    _back(back, parts.get("return", []))
    _precision(precision, parts.get("precision", []))
    _lengths(lengths, parts.get("batch", []))
    return figure


def _heads(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="a  Top-k: biased at the reference", x="distance from the reference (std of logits)",
         y="bias, relative to ‖∇KL‖")  # fmt: skip
    rows = [row for row in rows if row["distance"] and row["sharpness"] == min(one["sharpness"] for one in rows)]
    x = sorted({row["distance"] for row in rows})
    for k, (colour, marker) in HEADS.items():
        for form, line in (("top-k", "-"), ("head-alone", ":")):
            mine = [
                [r["relative_bias"] for r in rows if (r["form"], r["k"], r["distance"]) == (form, k, at)] for at in x
            ]
            if not all(mine) or not x:
                continue
            y = [float(np.exp(np.mean(np.log(one)))) for one in mine]
            axes.loglog(x, y, color=colour, linestyle=line, marker=marker if form == "top-k" else "", markersize=3,
                        linewidth=1.1)  # fmt: skip
            if form == "top-k":
                axes.annotate(f"k = {k}", (x[0], y[0]), (-4, -2), color=colour, ha="right", **SMALL)
    axes.axhline(1, color=FAINT, linewidth=0.6)
    if x:
        axes.set_xlim(x[0] / 2.6, 1.3 * x[-1])
    axes.text(0.03, 0.03, "solid: head and sampled tail\ndotted: the head alone\nhead detached, with tail: no bias",
              transform=axes.transAxes, size=6, va="bottom")  # fmt: skip


def _drift(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="b  …and drives the policy off it", x="k, the size of the head", y="mass of the head")
    rows = sorted(rows, key=lambda row: row["k"])
    place = np.arange(len(rows))
    axes.plot(place, [row["mass"] for row in rows], color=INK, marker="o", markersize=3, linewidth=1, label="reference")
    axes.plot(place, [row["mass_after"] for row in rows], **{**look("k3-loss").plot(), "color": HEADS[8][0]},
              label="after training on\nthe penalty alone")  # fmt: skip
    for at, row in zip(place, rows, strict=True):
        if row["predicted_mass"] is not None:
            axes.plot(at, row["predicted_mass"], "o", markersize=7, fillstyle="none", color=INK, markeredgewidth=0.7,
                      label="predicted end" if row["k"] != rows[-1]["k"] else None)  # fmt: skip
    axes.set_xticks(place, [str(row["k"]) for row in rows])
    axes.legend(frameon=False, fontsize=6.2, loc="upper left")
    axes.set_ylim(0, 1.08)


def _clamp(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="c  A clamped k3 is dead", x="log-ratio u = log π/ref of a token", y="weight of g in the gradient")
    rows = sorted((row for row in rows if row["bound"] == 10), key=lambda row: row["u"])
    if not rows:
        return
    u = np.array([row["u"] for row in rows])
    for low, high in ((u[0], rows[0]["low"]), (rows[0]["high"], u[-1])):
        axes.axvspan(low, high, color="#f3f0ec", linewidth=0)
        axes.text((low + high) / 2, -12.6, "dead", ha="center", size=6.5)
    axes.plot(u, [row["k3-loss"] for row in rows], color=look("k3-loss").colour, linewidth=1.1)
    axes.plot(u, [row["k3-clamped"] for row in rows], **CLAMPED)
    axes.plot(u, [row["k2-loss"] for row in rows], color=look("k2-loss").colour, linewidth=1.1)
    axes.annotate("k2: u", (8, 8), (-22, 2), color=look("k2-loss").colour, **SMALL)
    axes.annotate("k3: 1 − e⁻ᵘ", (2.2, 1), (0, -9), color=look("k3-loss").colour, **SMALL)
    axes.annotate("k3 clamped", (-2.6, -9), (7, -3), color=look("k3-loss").colour, **SMALL)
    axes.set(ylim=(-14, 14), xlim=(u[0], u[-1]))


def _back(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="d  …and lets a runaway policy stay", x="updates (exact gradients, no reward)",
         y="KL(π‖ref), nats")  # fmt: skip
    start = max((row["start"] for row in rows), default=0)
    places = {
        "k3-clamped": ("k3\nclamped", 330, (-7, -22)),
        "k3-loss": ("k3", 9, (5, 6)),
        "k2-loss": ("k2", 190, (5, -2)),
    }
    for name, (words, at, offset) in places.items():
        mine = [row for row in rows if (row["penalty"], row["start"]) == (name, start) and row["kl"] > 1e-6]
        if not mine:
            continue
        style = CLAMPED if name == "k3-clamped" else {**look(name).plot(marker="")}
        steps, kl = np.array([max(row["step"], 1) for row in mine]), [row["kl"] for row in mine]
        axes.plot(steps, kl, **style)
        axes.annotate(words, (at, float(np.interp(at, steps, kl))), offset, color=style["color"], **SMALL)
    axes.set(xscale="log", ylim=(-0.03, 1.35))


def _precision(axes: Axes, rows: list[Row]) -> None:
    largest = max((row["vocabulary"] for row in rows), default=0)
    tidy(
        axes,
        title="e  Precision: where digits are lost",
        x="size of the log-ratios",
        y="relative error of the gradient",
    )
    rows = [row for row in rows if row["vocabulary"] == largest]
    drawn = (
        ("k2-loss", "log-probs", "bfloat16", {"color": INK}, "log-probs in bfloat16", 2, (4, 6)),
        ("k2-loss", "log-probs", "float16", {"color": FAINT}, "in float16", 0, (-1, -11)),
        ("k3-loss", "arithmetic", "bfloat16", K3, "k3, log-ratio\nin bfloat16", 2, (-14, -24)),
        ("k2-loss", "arithmetic", "bfloat16", K2, "k2, k1: log-ratio\nin bfloat16", 4, (4, -17)),
        ("k2-loss", "log-probs", "float32", {"color": FAINT, "linestyle": ":"}, "log-probs\nin float32", 1, (-18, -23)),
    )  # fmt: skip
    for name, rounded, kind, style, words, at, offset in drawn:
        mine = sorted(
            (row for row in rows if (row["estimator"], row["rounded"], row["kind"]) == (name, rounded, kind)),
            key=lambda row: row["log_ratio"],
        )
        if not mine:
            continue
        x, y = [row["log_ratio"] for row in mine], [row["relative_error"] for row in mine]
        axes.loglog(x, y, **{"linewidth": 1.1, **style})
        if at < len(mine):
            axes.annotate(words, (x[at], y[at]), offset, color=style["color"], **SMALL)
        if rounded == "log-probs":
            known = [(row["log_ratio"], row["predicted_error"]) for row in mine if row["misread"] > 500]
            axes.plot(*zip(*known, strict=True), ".", color=style["color"], markersize=3.5)
    axes.axhline(1, color=HEADS[8][0], linewidth=0.6)
    axes.set_ylim(3e-6, 200)


def _lengths(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="f  One token-mean per batch", x="rollouts in a batch", y="distance from ∇KL/E[L], relative")
    for name, style, words, offset in (
        ("whole-return", look("k1-reward").plot(markersize=2.5), "k1 in the reward\n(limit: ∇KL/E[L])", (4, 6)),
        ("token-mean", look("token-mean").plot(linestyle="-"), "k2 in the loss\n(limit: local)", (-52, -16)),
    ):
        seeds = sorted({row["seed"] for row in rows})
        for seed in seeds:
            mine = sorted((r for r in rows if (r["normalised"], r["seed"]) == (name, seed)), key=_size)
            x, y = [row["batch_size"] for row in mine], [row["relative_distance"] for row in mine]
            axes.loglog(x, y, **{**style, "alpha": 1 if seed == seeds[0] else 0.35})
            if seed == seeds[0] and mine:
                at = len(mine) // 2
                axes.annotate(words, (x[at], y[at]), offset, color=style["color"], **SMALL)
    axes.text(
        0.97, 0.95, "falls like 1/B\n(pale: another world)", transform=axes.transAxes, size=6.2, ha="right", va="top"
    )


def _size(row: Row) -> int:
    return row["batch_size"]
