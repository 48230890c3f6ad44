"""Six approximations of a KL penalty: top-k heads, their drift, clamps, the way back, low precision, lengths."""

import numpy as np

from .style import FAINT, INK, ORDER, Axes, DataFrame, Figure, label, look, note, panels, select, tidy

HEADS = {2: (ORDER(0.2), "s"), 8: (ORDER(0.5), "o"), 16: (ORDER(0.9), "D")}
CLAMPED = {"color": look("k3-loss").colour, "linestyle": "--", "linewidth": 1.3}
K2, K3 = (look(name).plot(markevery=0.3) for name in ("k2-loss", "k3-loss"))


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (heads, drift, clamp, back, precision, lengths) = panels(6, 5.5)
    _heads(heads, select(rows, "head"))
    _drift(drift, select(rows, "drift", form="top-k", likely_mass=0.8).sort_values("k"))
    _clamp(clamp, select(rows, "clamp", bound=10.0).sort_values("u"))
    _back(back, select(rows, "return"))
    _precision(precision, select(rows, "precision", seed=0))
    _lengths(lengths, select(rows, "batch"))
    return figure


def _heads(axes: Axes, rows: DataFrame) -> None:
    tidy(
        axes,
        title="a  Top-k: biased at the reference",
        x="distance from the reference (std of logits)",
        y="bias, relative to ‖∇KL‖",
    )
    rows = select(rows[rows["distance"] > 0], sharpness=rows["sharpness"].min())
    for k, (colour, marker) in HEADS.items():
        for form, line in (("top-k", "-"), ("head-alone", ":")):
            mine = select(rows, form=form, k=k)
            y = np.exp(np.log(mine["relative_bias"].astype(float)).groupby(mine["distance"]).mean())
            style = {"color": colour, "linestyle": line, "marker": marker if form == "top-k" else ""}
            axes.loglog(y.index, y, markersize=3, linewidth=1.1, label=f"k = {k}" if form == "top-k" else None, **style)
    axes.axhline(1, color=FAINT, linewidth=0.6)
    axes.set_ylim(bottom=0.03)
    axes.legend(loc="upper right")
    words = "solid: head and sampled tail\ndotted: the head alone\nhead detached, with tail: no bias"
    note(axes, 0.03, 0.03, words, va="bottom")


def _drift(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  …and drives the policy off it", x="k, the size of the head", y="mass of the head")
    place = np.arange(len(rows))
    axes.plot(place, rows["mass"], color=INK, marker="o", markersize=3, linewidth=1, label="reference")
    axes.plot(
        place,
        rows["mass_after"],
        color=HEADS[8][0],
        marker="s",
        markersize=3,
        linewidth=1,
        label="after training on the penalty alone",
    )
    circle = {"markersize": 7, "fillstyle": "none", "color": INK, "markeredgewidth": 0.7}
    for at, mass in zip(place, rows["predicted_mass"].astype(float), strict=True):
        if not np.isnan(mass):
            axes.plot(at, mass, "o", label="predicted end" if at < len(rows) - 1 else None, **circle)
    axes.set_xticks(place, rows["k"].astype(str))
    axes.legend(loc="upper left")
    axes.set_ylim(0, 1.55)
    axes.set_yticks((0, 0.5, 1))


def _clamp(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  A clamped k₃ is dead", x="log-ratio u = log π/ref of a token", y="weight of g in the gradient")
    u, first = rows["u"].to_numpy(), rows.iloc[0]
    for low, high in ((u[0], first["low"]), (first["high"], u[-1])):
        axes.axvspan(low, high, color="#f3f0ec", linewidth=0)
        axes.text((low + high) / 2, -12.6, "dead", ha="center")
    axes.plot(u, rows["k3-loss"], color=look("k3-loss").colour, linewidth=1.1)
    axes.plot(u, rows["k3-clamped"], **CLAMPED)
    axes.plot(u, rows["k2-loss"], color=look("k2-loss").colour, linewidth=1.1)
    label(axes, "k₂: u", (8, 8), (-24, 2), look("k2-loss").colour)
    label(axes, "k₃: 1 − e⁻ᵘ", (2.2, 1), (4, -10), look("k3-loss").colour)
    label(axes, "k₃ clamped", (-2.6, -9), (7, -3), look("k3-loss").colour)
    axes.set(ylim=(-14, 14), xlim=(u[0], u[-1]))


def _back(axes: Axes, rows: DataFrame) -> None:
    tidy(
        axes, title="d  …and lets a runaway policy stay", x="updates (exact gradients, no reward)", y="KL(π‖ref), nats"
    )
    rows = select(rows[rows["kl"] > 1e-6], start=rows["start"].max())
    for name in ("k3-clamped", "k2-loss", "k3-loss"):
        mine = select(rows, penalty=name)
        style = CLAMPED if name == "k3-clamped" else look(name).plot(markevery=0.3)
        axes.plot(mine["step"].clip(lower=1), mine["kl"], label=look(name).words or "k₃ in the loss, clamped", **style)
    axes.set(xscale="log", ylim=(-0.03, 2.1), yticks=(0, 0.4, 0.8, 1.2))
    axes.legend(loc="upper left")


def _precision(axes: Axes, rows: DataFrame) -> None:
    y = "relative error of the gradient"
    tidy(axes, title="e  Precision: where digits are lost", x="size of the log-ratios", y=y)
    rows = select(rows, vocabulary=rows["vocabulary"].max()).sort_values("log_ratio")
    drawn = (
        ("k2-loss", "log-probs", "bfloat16", {"color": INK}, "log-probs in bfloat16", 2, (4, 6)),
        ("k2-loss", "log-probs", "float16", {"color": FAINT}, "in float16", -1, (4, 0)),
        ("k3-loss", "arithmetic", "bfloat16", K3, "k₃, log-ratio\nin bfloat16", 2, (-14, -24)),
        ("k2-loss", "arithmetic", "bfloat16", K2, "k₂, k₁: log-ratio\nin bfloat16", 4, (4, -17)),
        ("k2-loss", "log-probs", "float32", {"color": FAINT, "linestyle": ":"}, "log-probs\nin float32", 1, (-18, -23)),
    )
    for name, rounded, kind, style, words, at, offset in drawn:
        mine = select(rows, estimator=name, rounded=rounded, kind=kind)
        axes.loglog(mine["log_ratio"], mine["relative_error"], **{"linewidth": 1.1, **style})
        if -1 <= at < len(mine):
            label(axes, words, tuple(mine.iloc[at][["log_ratio", "relative_error"]]), offset, style["color"])
        if rounded == "log-probs":
            known = mine[mine["misread"] > 500]
            axes.plot(known["log_ratio"], known["predicted_error"], ".", color=style["color"], markersize=3.5)
    axes.axhline(1, color=HEADS[8][0], linewidth=0.6)
    axes.set(xlim=(None, 4 * rows["log_ratio"].max()), ylim=(3e-6, 500))


def _lengths(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="f  One token-mean per batch", x="rollouts in a batch", y="relative distance from limit")
    for name, style, words in (
        ("whole-return", look("k1-reward").plot(markersize=2.5), look("k1-reward").words),
        ("token-mean", look("token-mean").plot(linestyle="-"), look("k2-loss").words),
    ):
        for at, (_, mine) in enumerate(select(rows, normalised=name).sort_values("batch_size").groupby("seed")):
            pale = {"alpha": 0.35} if at else {"label": words}
            axes.loglog(mine["batch_size"], mine["relative_distance"], **style, **pale)
    axes.legend(loc="upper right", title="falls like 1/B")
    note(axes, 0.03, 0.04, "limit of k₁: ∇KL/E[L]\nof k₂: the local gradient\npale: other environments")
