"""Six ways in which a logged KL is none: changed in place, steered by, reweighted, masked, noisy, divided by lengths.

Reads metrics/metrics.json among the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import FAINT, INK, PAGE_WIDTH, look, tidy

Row = dict[str, Any]
WRONG = look("k3-loss").colour
RIGHT = look("k1-reward").colour
SMALL = {"textcoords": "offset points", "size": 6.2}
SHADES = {1: "#fdae6b", 2: "#ef6548", 4: "#b30000", 8: "#4d0000"}


def draw(results: Path) -> Figure:
    rows = json.loads((results / "metrics" / "metrics.json").read_text())
    figure = Figure(figsize=(PAGE_WIDTH, 4.5), layout="constrained")
    (mutation, controller, reweighted), (masked, noise, means) = figure.subplots(2, 3)
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    _mutation(mutation, parts.get("mutation", []))
    _controller(controller, parts.get("controller", []))
    _reweighted(reweighted, parts.get("reweighted", []))
    _masked(masked, parts.get("masked", []))
    logged = parts.get("logged", [])
    smallest = min((row["beta"] for row in logged), default=None)
    logged = [row for row in logged if (row["beta"], row["seed"]) == (smallest, 0)]
    _noise(noise, logged)
    _means(means, logged)
    return figure


def _mutation(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="a  Recorded, then changed in place", x="updates", y="nats")
    largest = max((row["beta"] for row in rows), default=None)
    rows = sorted((r for r in rows if not r["copied"] and (r["beta"], r["seed"]) == (largest, 0)), key=_step)
    if not rows:
        return
    x, last = [row["step"] for row in rows], rows[-1]
    axes.plot(x, [row["kl"] for row in rows], color=INK, linewidth=1.3)
    axes.plot(x, [row["recorded"] for row in rows], ".", color=INK, markersize=3, markevery=6)
    axes.plot(x, [row["read"] for row in rows], color=WRONG, linestyle="--", linewidth=1.3)
    for row_of, words, offset, colour in (
        ("kl", "KL(π‖ref), and what\nis recorded (dots)", (-2, -42), INK),
        ("read", "what is read afterwards:\nthe objective E[R] − β·KL", (-2, 5), WRONG),
    ):
        axes.annotate(words, (last["step"], last[row_of]), offset, ha="right", color=colour, **SMALL)
    axes.set_ylim(-0.08, 1.25 * last["read"])


def _controller(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="b  A β that adapts to it", x="rounds of the controller", y="KL(π‖ref), nats")
    drawn = (
        ("kl", 1.0, {"color": RIGHT}, "reads the KL: on target", 0.98, (0, -10)),
        ("k2", 1.0, {"color": look("k2-loss").colour, "linestyle": "-."}, "reads k2", 0.98, (0, 3)),
        ("mutated", -1.0, {"color": WRONG, "linestyle": ":"}, "mutated, rewards − 1", 0.98, (0, 3)),
        ("mutated", 1.0, {"color": WRONG, "linestyle": "--"}, "mutated, rewards + 1", 0.2, (4, 2)),
    )
    for read, offset, style, words, place, shift in drawn:
        mine = sorted((r for r in rows if (r["read"], r["offset"]) == (read, offset)), key=lambda row: row["round"])
        if not mine:
            continue
        x, y = [row["round"] for row in mine], [row["kl"] for row in mine]
        axes.semilogy(x, y, linewidth=1.2, **style)
        at = round(place * (len(mine) - 1))
        axes.annotate(
            words, (x[at], y[at]), shift, color=style["color"], ha="right" if place > 0.9 else "left", **SMALL
        )
    axes.set_ylim(2e-3, 1.5)


def _reweighted(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="c  Multiplied by a ratio", x="staleness: bound on |log π/μ|", y="metric ÷ KL(π‖ref)")
    rows = sorted((row for row in rows if row["seed"] == 0), key=lambda row: row["staleness"])
    if not rows:
        return
    x = [row["staleness"] for row in rows]
    for name, words, style, at, offset in (
        ("token ratio", "token's", look("k3-ratio").plot(), -1, (-34, 5)),
        ("sequence ratio", "sequence's", look("k1-reward-sequence-ratio").plot(), -1, (-44, 4)),
        ("no ratio", "none", look("k1-reward").plot(color=FAINT), -2, (10, 0)),
        ("geometric ratio", "geometric mean", look("k3-broadcast-ratio").plot(), -1, (-80, -4)),
    ):
        y = [row[name] / row["kl"] for row in rows]
        axes.plot(x, y, **style)
        axes.annotate(words, (x[at], y[at]), offset, color=style["color"], **SMALL)
    advantage = [row["advantage"] / row["kl"] for row in rows]
    words = f"times the advantage: {min(advantage):.1f} to {max(advantage):.1f}\n(off this scale)".replace("-", "−")
    axes.text(0.03, 0.04, words,
              transform=axes.transAxes, size=6.2)  # fmt: skip
    axes.set_ylim(0.2, 1.3)


def _masked(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="d  Masked where rewards tie", x="probability of a right answer", y="nats")
    rows = sorted(rows, key=lambda row: row["success"])
    if not rows:
        return
    some = [row for row in rows if row["group_size"] == rows[0]["group_size"]]
    axes.plot(
        [row["success"] for row in some], [row["kl"] for row in some], color=INK, linewidth=1.3, label="KL(π‖ref)"
    )
    for size, line in ((8, ":"), (4, "-."), (2, "--"), (1, "-")):
        mine = [row for row in rows if row["group_size"] == size]
        x, y = [row["success"] for row in mine], [row["read"] for row in mine]
        axes.plot(
            x,
            y,
            color=SHADES[size],
            linestyle=line,
            linewidth=1.2,
            label=f"read in groups of {size}" + (": 0" if size == 1 else ""),
        )
    axes.legend(frameon=False, fontsize=6.2, loc="upper center", labelspacing=0.25)
    axes.set_ylim(-0.13, 0.82)
    axes.axhline(0, color=FAINT, linewidth=0.5)


def _noise(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="e  Noise of k1, k2, k3 along a run", x="KL(π‖ref), nats", y="std of one rollout ÷ KL")
    for name, words, at, offset in (
        ("k1-loss", "k1 (thin line: √(2/KL))", 0, (5, 2)),
        ("k2-loss", "k2", 0, (0, -10)),
        ("k3-loss", "k3", -1, (-12, 2)),
    ):
        mine = sorted((row for row in rows if row["estimator"] == name), key=lambda row: row["kl"])
        if not mine:
            continue
        style = look(name).plot()
        x = [row["kl"] for row in mine]
        axes.loglog(x, [row["std"] / row["kl"] for row in mine], **style)
        axes.annotate(words, (x[at], mine[at]["std"] / mine[at]["kl"]), offset, color=style["color"], **SMALL)
        if name == "k2-loss":
            bias = [abs(row["mean"] - row["kl"]) / row["kl"] for row in mine]
            axes.loglog(x, bias, color=style["color"], linestyle=":", linewidth=1.1)
            axes.annotate("bias of k2 (others: 0)", (x[2], bias[2]), (0, -11), color=style["color"], **SMALL)
    if rows:
        x = sorted({row["kl"] for row in rows})
        axes.loglog(x, [(2 / kl) ** 0.5 for kl in x], color=INK, linewidth=0.7)


def _means(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="f  Three “KLs per token”", x="updates", y="nats per token")
    k1, k3 = (
        sorted((row for row in rows if row["estimator"] == name), key=_step) for name in ("k1-loss", "k3-loss")
    )  # fmt: skip
    if not k1 or not k3:
        return
    x = [row["step"] for row in k1]
    for values, words, style, at, offset in (
        ([row["over_own_length"] for row in k3], "E[Σk3/L]", {"color": WRONG}, -4, (-30, 4)),
        ([row["kl_per_token"] for row in k1], "E[Σu]/E[L]", {"color": INK}, -1, (-44, 4)),
        ([row["over_own_length"] for row in k1], "E[Σu/L]", {"color": RIGHT, "linestyle": "--"}, 5, (7, -8)),
    ):
        axes.semilogx(x, values, linewidth=1.2, marker=".", markersize=3, **style)
        axes.annotate(words, (x[at], values[at]), offset, color=style["color"], **SMALL)
    below = min(range(len(k1)), key=lambda index: k1[index]["over_own_length"])
    axes.annotate("below zero", (x[below], k1[below]["over_own_length"]), (14, -5), color=RIGHT, **SMALL)
    axes.axhline(0, color=FAINT, linewidth=0.5)
    axes.set_ylim(-0.2, 1.7)


def _step(row: Row) -> int:
    return row["step"]
