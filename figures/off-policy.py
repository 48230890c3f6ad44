"""What staleness costs: drift of the gradient, effective samples, noise, stability and where training ends.

Reads off-policy/off-policy.json among the results.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import FAINT, INK, PAGE_WIDTH, Look, look, tidy

Row = dict[str, Any]
DRIFT = {
    "k1-reward": "no ratio",
    "k1-reward-stale": "stale rewards",
    "k3-broadcast-ratio": "broadcast",
    "k1-reward-clipped-ratio": "clipped",
    "k3-ratio": "token",
}
PRICE = {
    "k1-reward-sequence-ratio": "sequence",
    "k1-reward-to-go-prefix-ratio": "prefix, to go",
    "k2-prefix-ratio": "prefix, $k_2$",
    "k3-ratio": "token, $k_3$",
    "k1-reward": "none",
}
# Ways to train, by the look of their KL term; what shares one is told apart by its line.
RECIPES = {
    "stale": ("stale rewards", look("k1-reward-stale")),
    "none": ("no ratio, no baseline", look("k1-loss")),
    "token-clipped": ("clipped", Look("#b8860b", ":", "v")),
    "token-detached": ("token, detached", look("k3-ratio-detached")),
    "token": ("token", look("k3-ratio")),
    "sequence": ("sequence", look("k1-reward-sequence-ratio")),
    "prefix-to-go": ("prefix, to go", look("k1-reward-to-go-prefix-ratio")),
    "none-centred": ("no ratio, baseline", look("leave-one-out")),
}
LOOKS = {"k1-reward-clipped-ratio": Look("#b8860b", ":", "v")}


def draw(results: Path) -> Figure:
    rows = json.loads((results / "off-policy" / "off-policy.json").read_text())
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[row["part"]].append(row)
    figure = Figure(figsize=(PAGE_WIDTH, 4.5), layout="constrained")
    (drift, shares, price), (cycle, exact, drawn) = figure.subplots(2, 3)
    _drift(drift, parts["path"])
    _shares(shares, parts["weights"])
    _price(price, parts["length"])
    # The world whose optimum is farthest from the reference: staleness has most to spoil there.
    world = max(parts["stability"], key=lambda row: row["kl"], default={"seed": None})["seed"]
    _cycle(cycle, [row for row in parts["stability"] if row["seed"] == world])
    trained = [row for row in parts["training"] if row["seed"] == world]
    _ends(exact, [row for row in trained if not row["batch_size"]], "Where exact training ends", "e")
    size = max((row["batch_size"] for row in trained), default=0)
    _ends(drawn, [row for row in trained if size and row["batch_size"] == size], f"With {size} rollouts", "f")
    drawn.sharey(exact)
    drawn.set_ylabel("")
    handles, words = exact.get_legend_handles_labels()
    figure.legend(handles, words, frameon=False, fontsize=6.4, ncols=4, loc="outside lower right", handlelength=3)
    return figure


def _means(rows: list[Row], along: str, column: str) -> tuple[list[float], np.ndarray]:
    x = sorted({row[along] for row in rows})
    return x, np.array([np.mean([row[column] for row in rows if row[along] == one]) for one in x])


def _label(axes: Axes, x: float, y: float, words: str, colour: str, offset: tuple[int, int] = (4, 0)) -> None:
    axes.annotate(words, (x, y), offset, textcoords="offset points", size=6.2, color=colour, va="center")


def _updates(axes: Axes, ticks: list[float], label: str) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _drift(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="a  What staleness adds", y="change of gradient / length of ∇KL")
    longest = max((row["length"] for row in rows), default=0)
    rows = [row for row in rows if row["length"] == longest and row["staleness"]]
    offsets = {
        "k1-reward": (4, -3),
        "k3-broadcast-ratio": (4, 4),
        "k1-reward-clipped-ratio": (4, -4),
        "k3-ratio": (4, 4),
    }
    for name, words in DRIFT.items():
        x, y = _means([row for row in rows if row["estimator"] == name], "staleness", "drift")
        style = LOOKS.get(name, look(name))
        axes.plot(x, y, **style.plot())
        if x:
            _label(axes, x[-1], y[-1], words, style.colour, offsets.get(name, (4, 0)))
    ticks = sorted({row["staleness"] for row in rows})
    _updates(axes, ticks, "updates that the sampler is behind")
    if ticks:
        axes.set_xlim(0.85, max(ticks) * 6)
        axes.text(
            0.97, 0.03, "prefix and sequence ratios:\nnone, at any staleness", transform=axes.transAxes, size=6.2,
            ha="right", va="bottom", color=look("k1-reward-sequence-ratio").colour,
        )  # fmt: skip


def _shares(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="b  Rollouts that count", x="tokens of a rollout", y="effective share of samples")
    noises = sorted({row["noise"] for row in rows})
    noise = noises[len(noises) // 2 - 1] if noises else None
    mine = [row for row in rows if row["noise"] == noise]
    for column, name, words, at, offset in (
        ("token_share", "k3-ratio", "token weights", -4, (-20, -7)),
        ("prefix_share", "k2-prefix-ratio", "prefix\nweights", -3, (-1, 15)),
        ("log_sequence_share", "k1-reward-sequence-ratio", "sequence\nweights", -5, (-48, -5)),
    ):
        x, y = _means(mine, "at", column)
        y = np.exp(y) if column.startswith("log") else y
        axes.plot(x, y, **look(name).plot(markersize=2.6))
        if len(x) > 5:
            _label(axes, x[at], y[at], words, look(name).colour, offset)
    axes.set(xscale="log", ylim=(-0.03, 1.05))
    longest = max((row["at"] for row in mine), default=1)
    if mine:
        each = np.mean([row["kl_to_sampler"] / longest for row in mine if row["at"] == longest])
        axes.text(0.03, 0.05, f"KL(π‖μ) = {each:.4f} nats a token", transform=axes.transAxes, size=6.2, color=INK)


def _price(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="c  The price in noise", x="tokens of a rollout", y="variance / the same, on-policy")
    for name, words in PRICE.items():
        x, y = _means([row for row in rows if row["compared"] == name], "tokens", "price")
        axes.plot(x, y, **look(name).plot())
        if x:
            _label(axes, x[-1], y[-1], words, look(name).colour)
    axes.axhline(1, color=FAINT, linewidth=0.6, linestyle=":")
    longest = max((row["tokens"] for row in rows), default=1)
    axes.set(xlim=(0.6, longest * 1.5), ylim=(0, None))
    axes.set_xticks(sorted({row["tokens"] for row in rows}))


def _cycle(axes: Axes, rows: list[Row]) -> None:
    tidy(axes, title="d  Does a cycle settle?", y="factor on a small step off rest")
    for name, (words, style) in RECIPES.items():
        if name in ("token-clipped", "token-detached", "prefix-to-go", "token"):
            continue
        mine = [row for row in rows if row["recipe"] == name]
        x, y = _means(mine, "updates", "multiplier")
        axes.plot(x, y, **style.plot(linestyle="none"))
        predicted = [row["predicted"] for row in sorted(mine, key=lambda row: row["updates"])]
        axes.plot(x, predicted, color=style.colour, linewidth=0.9)
        if x and name in ("stale", "none"):
            _label(axes, x[-1], y[-1], words.replace(", ", ",\n"), style.colour)
    axes.axhline(1, color=INK, linewidth=0.6, linestyle=":")
    ticks = [one for one in (1, 4, 16, 64) if rows]
    _updates(axes, ticks, "updates to one sampler")
    if rows:
        axes.set(xlim=(0.85, 400), ylim=(0.5, 900))
        _label(axes, 1, 0.78, "sequence ratio; no ratio, baseline", look("k1-reward-sequence-ratio").colour, (0, -3))


def _ends(axes: Axes, rows: list[Row], title: str, letter: str) -> None:
    tidy(axes, title=f"{letter}  {title}", y="J* − J at the end, nats")
    for name, (words, style) in RECIPES.items():
        mine = sorted((row for row in rows if row["recipe"] == name), key=lambda row: row["inner_steps"])
        x = [row["inner_steps"] for row in mine]
        axes.plot(x, [row["gap"] for row in mine], label=words, **style.plot())
        if any(row["batch_size"] for row in mine):
            low, high = ([row[column] for row in mine] for column in ("low", "high"))
            axes.fill_between(x, low, high, color=style.colour, alpha=0.12, linewidth=0)
    ticks = sorted({row["inner_steps"] for row in rows})
    _updates(axes, ticks, "updates to one sampler")
