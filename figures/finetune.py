"""A language model under each KL term: frontier, what a coefficient buys, every run, elsewhere, the gradient followed.

Reads finetune/finetune.json among the results, of which the committed sweep alone.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy.stats import t

from .style import FAINT, HAIRLINE, INK, PAGE_WIDTH, Axes, DataFrame, Figure, label, look, note, select, tidy

# The runs that have ended, by term and coefficient: a row a seed.
Ended = dict[tuple[str, float], DataFrame]
# By variant: what it is called here, in full and in short.
WORDS = {
    "none": ("no KL term", "no KL\nterm"),
    "stale:none": ("no KL term, stale", "none,\nstale"),
    "k1-reward": ("$k_1$ in reward", "$k_1$ in\nreward"),
    "slow:k1-reward": ("$k_1$ in reward, slow", "$k_1$,\nslow"),
    "leave-one-out": ("$k_1$ in reward, baseline", "$k_1$,\nbasel."),
    "k2-loss": ("$k_2$ in loss", "$k_2$ in\nloss"),
    "k3-loss": ("$k_3$ in loss", "$k_3$ in\nloss"),
    "k1-loss": ("$k_1$ in loss", "$k_1$ in\nloss"),
    "stale:k2-loss": ("$k_2$ in loss, stale", "$k_2$,\nstale"),
    "stale:k3-ratio": ("$k_3$ with ratio, stale", "$k_3$, ratio,\nstale"),
}
# What is written beside the ends of a curve: at the largest coefficient, at the smallest.
ENDS: dict[str, tuple[tuple[str, tuple[int, int]], ...]] = {
    "k1-reward": (("β = 1", (-10, -12)), ("β = 0.03", (-2, 12))),
    "k1-loss": (("β = 1", (-12, 8)),),
    "none": (("no KL term", (8, 4)),),
    "stale:none": (("no KL term, stale", (-44, -12)),),
}
TERMS = [variant for variant in WORDS if not variant.endswith("none")]
OPTIMUM = "optimum"


def draw(rows: DataFrame) -> Figure:
    rows = select(rows, "committed")
    figure = Figure(figsize=(PAGE_WIDTH, 7.4), layout="constrained")
    (frontier, realised), (every, elsewhere), (followed, key) = figure.subplots(3, 2)
    run = ["variant", "beta", "seed"]
    start, end = (select(rows, update=update).set_index(run) for update in (0, rows["update"].max()))
    end["gain"] = end["reward_held_out"] - start["reward_held_out"]
    last: Ended = dict(iter(end.reset_index().groupby(run[:2], sort=False)))
    _frontier(frontier, last)
    _realised(realised, last)
    _every(every, last)
    _elsewhere(elsewhere, last)
    _followed(followed, rows)
    key.set_axis_off()
    handles, labels = realised.get_legend_handles_labels()
    if handles:
        key.legend(handles, labels, loc="center", frameon=False, fontsize=7.0)
    return figure


def _interval(values: pd.Series, *, positive: bool = False) -> tuple[float, float, float]:
    """A mean over seeds (geometric, if asked), and how far its 95 % interval (Student's t) reaches below and above."""
    known = np.log(values) if positive else np.array(values)
    mean = float(known.mean())
    spread = known.std(ddof=1) / len(known) ** 0.5 if len(known) > 1 else 0.0
    reach = float(t.ppf(0.975, max(len(known) - 1, 1)) * spread)
    if not positive:
        return mean, reach, reach
    middle = float(np.exp(mean))
    return middle, middle - float(np.exp(mean - reach)), float(np.exp(mean + reach)) - middle


def _curve(last: Ended, variant: str, name: str) -> tuple[list[float], Any, Any]:
    """The coefficients of an variant, a metric's mean over seeds, and how far its interval reaches."""
    betas = sorted(beta for one, beta in last if one == variant)
    found = [_interval(last[variant, beta][name], positive=name == "kl") for beta in betas]
    return betas, [mean for mean, _, _ in found], np.array([reach for _, *reach in found]).T


def _frontier(axes: Axes, last: Ended) -> None:
    tidy(axes, title="a  What a KL earns", x="KL(π‖ref) at the end, nats", y="held-out reward gained")
    _nats(axes.xaxis)
    axes.axhline(0, color=INK, linewidth=0.6)
    for variant in (*TERMS, "none", "stale:none"):
        betas, x, wide = _curve(last, variant, "kl")
        if not betas:
            continue
        _, y, high = _curve(last, variant, "gain")
        style = _style(variant)
        axes.errorbar(x, y, high, wide, **style, elinewidth=0.5)
        if variant in ENDS:
            for at, (words, shift) in zip((-1, 0), ENDS[variant], strict=False):
                label(axes, words, (x[at], y[at]), shift, style["color"])

    betas, x, _ = _curve(last, OPTIMUM, "kl")
    if betas:
        _, y, _ = _curve(last, OPTIMUM, "gain")
        axes.plot(x, y, **_style(OPTIMUM))
        for beta, *at in zip(betas, x, y, strict=True):
            label(axes, f"π*, β = {beta:g}", at, (5, -2))


def _realised(axes: Axes, last: Ended) -> None:
    tidy(axes, title="b  The KL that a coefficient buys", x="coefficient β", y="KL(π‖ref) at the end, nats")
    axes.set_xscale("log")
    _nats(axes.yaxis)
    for variant, line in (("none", "-"), ("stale:none", "--")):
        _, y, high = _curve(last, variant, "kl")
        if y:
            axes.axhline(y[0], color=INK, linewidth=0.9, linestyle=line)
            axes.axhspan(y[0] - high[0][0], y[0] + high[1][0], color=HAIRLINE, alpha=0.45, linewidth=0)
            at = (0.82 if variant == "none" else 0.5, y[0])
            label(axes, WORDS[variant][0], at, (0, 2), xycoords=("axes fraction", "data"), ha="center")
    for shift, variant in enumerate(TERMS):
        betas, y, high = _curve(last, variant, "kl")
        if betas:
            beside = [beta * 1.05 ** (shift - 3) for beta in betas]
            axes.errorbar(beside, y, high, **_style(variant), elinewidth=0.6, label=WORDS[variant][0])
    betas, y, _ = _curve(last, OPTIMUM, "kl")
    if betas:
        axes.plot(betas, y, **_style(OPTIMUM), label="π*, the optimum")
    axes.xaxis.set_major_locator(FixedLocator(sorted({beta for _, beta in last if beta > 0})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _nats(axis: Any) -> None:
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _every(axes: Axes, last: Ended) -> None:
    tidy(axes, title="c  Every run: a mark a seed, β growing to the right", y="held-out reward gained")
    names = list(WORDS)
    for (variant, beta), rows in last.items():
        if variant == OPTIMUM:
            continue
        betas = sorted(one for name, one in last if name == variant)
        place = names.index(variant) + (betas.index(beta) - (len(betas) - 1) / 2) * 0.2
        axes.plot([place] * len(rows), rows["gain"], **{**_style(variant), "linestyle": ""})
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set_xticks(range(len(names)), [short for _, short in WORDS.values()])
    axes.tick_params(axis="x", labelsize=6, length=0)


def _elsewhere(axes: Axes, last: Ended) -> None:
    name = "kl_out_of_distribution"
    tidy(axes, title="d  Every run on longer numbers, never trained on", x="KL(π‖ref), nats", y="KL there, nats")
    for (variant, _), rows in last.items():
        known = rows[rows[name] > 0]
        if len(known):
            axes.plot(known["kl"], known[name], **{**_style(variant), "linestyle": "", "markersize": 2.6})
    for axis in (axes.xaxis, axes.yaxis):
        _nats(axis)
    axes.axline((0.1, 0.1), (1, 1), color=INK, linewidth=0.6)


def _followed(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="e  The direction that is followed", x="updates", y="cosine of E[gradient] and ∇KL(π‖ref)")
    axes.axhline(1, color=INK, linewidth=0.7)
    updates = sorted(rows.dropna(subset=["kl_gradient_size"])["update"].unique())
    for shift, variant in enumerate(TERMS):
        x, y, high = [], [], []
        name = "stale_gradient_cosine" if "stale" in variant else "kl_gradient_cosine"
        for update in updates:
            values = select(rows, variant=variant, update=update)[name].dropna()
            # What is not told from zero has no direction, and two seeds have no interval that could be seen.
            if len(values) > 2:
                mean, reach, _ = _interval(values)
                x.append(update + (shift - 3) * 0.6)
                y.append(mean)
                high.append(reach)
        if x:
            axes.errorbar(x, y, high, **_style(variant), elinewidth=0.6)
    axes.set_xticks(updates)
    note(axes, 0.02, 0.04, "$k_1$ in loss has none: not told from zero", color=FAINT)


def _style(variant: str) -> dict[str, Any]:
    if variant.endswith("none"):
        marker = "*" if variant == "none" else "P"
        return look("none").plot(color=INK, linestyle="", marker=marker, markersize=5.5, markeredgewidth=0.2)
    if variant == OPTIMUM:
        return look("truth").plot(color=INK, linestyle="-.", marker="D", markerfacecolor="white")
    otherwise, _, term = variant.rpartition(":")
    if term == "leave-one-out":
        return look(term).plot(fillstyle="left", markerfacecoloralt="white")
    return look(term).plot(**({"linestyle": "--", "markerfacecolor": "white"} if otherwise else {}))
