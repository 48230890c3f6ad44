"""Six ways in which a logged KL is none: changed in place, steered by, reweighted, masked, noisy, averaged."""

from .style import FAINT, INK, PAGE_WIDTH, Axes, DataFrame, Figure, label, look, note, select, tidy

WRONG = look("k3-loss").colour
RIGHT = look("k1-reward").colour
SHADES = {1: "#fdae6b", 2: "#ef6548", 4: "#b30000", 8: "#4d0000"}


def draw(rows: DataFrame) -> Figure:
    figure = Figure(figsize=(PAGE_WIDTH, 4.5), layout="constrained")
    (mutation, controller, reweighted), (masked, noise, means) = figure.subplots(2, 3)
    _mutation(mutation, select(rows, "mutation"))
    _controller(controller, select(rows, "controller", seed=0))
    _reweighted(reweighted, select(rows, "reweighted", seed=0))
    _masked(masked, select(rows, "masked", seed=0))
    logged = select(rows, "logged")
    logged = select(logged, beta=logged["beta"].min(), seed=0)
    _noise(noise, logged)
    _means(means, logged)
    return figure


def _mutation(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  Recorded, then changed in place", x="updates", y="nats")
    rows = select(rows, copied=False, beta=rows["beta"].max(), seed=0).sort_values("step")
    x, last = rows["step"], rows.iloc[-1]
    axes.plot(x, rows["kl"], color=INK, linewidth=1.3)
    axes.plot(x, rows["recorded"], ".", color=INK, markersize=3, markevery=6)
    axes.plot(x, rows["read"], color=WRONG, linestyle="--", linewidth=1.3)
    for row_of, words, offset, colour in (
        ("kl", "KL(π‖ref), and what\nis recorded (dots)", (-2, -42), INK),
        ("read", "what is read afterwards:\nthe objective E[R] − β·KL", (-2, 5), WRONG),
    ):
        label(axes, words, (last["step"], last[row_of]), offset, colour, ha="right")
    axes.set_ylim(-0.08, 1.25 * last["read"])


def _controller(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  A β that adapts to it", x="rounds of the controller", y="KL(π‖ref), nats")
    drawn = (
        ("kl", 1.0, {"color": RIGHT}, "reads the KL: on target", 0.98, (0, -10)),
        ("k2", 1.0, {"color": look("k2-loss").colour, "linestyle": "-."}, "reads k2", 0.98, (0, 3)),
        ("mutated", -1.0, {"color": WRONG, "linestyle": ":"}, "mutated, rewards − 1", 0.98, (0, 3)),
        ("mutated", 1.0, {"color": WRONG, "linestyle": "--"}, "mutated, rewards + 1", 0.2, (4, 2)),
    )
    for read, offset, style, words, place, shift in drawn:
        mine = select(rows, read=read, offset=offset).sort_values("round")
        if mine.empty:
            continue
        axes.semilogy(mine["round"], mine["kl"], linewidth=1.2, **style)
        at = tuple(mine.iloc[round(place * (len(mine) - 1))][["round", "kl"]])
        label(axes, words, at, shift, style["color"], ha="right" if place > 0.9 else "left")
    axes.set_ylim(2e-3, 1.5)


def _reweighted(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Multiplied by a ratio", x="staleness: bound on |log π/μ|", y="metric ÷ KL(π‖ref)")
    rows = rows.sort_values("staleness")
    x = rows["staleness"].to_numpy()
    for name, words, style, at, offset in (
        ("token ratio", "token's", look("k3-ratio").plot(), -1, (-34, 5)),
        ("sequence ratio", "sequence's", look("k1-reward-sequence-ratio").plot(), -1, (-44, 4)),
        ("no ratio", "none", look("k1-reward").plot(color=FAINT), -2, (10, 0)),
        ("geometric ratio", "geometric mean", look("k3-broadcast-ratio").plot(), -1, (-80, -4)),
    ):
        y = (rows[name] / rows["kl"]).to_numpy()
        axes.plot(x, y, **style)
        label(axes, words, (x[at], y[at]), offset, style["color"])
    advantage = rows["advantage"] / rows["kl"]
    words = f"times the advantage: {min(advantage):.1f} to {max(advantage):.1f}\n(off this scale)".replace("-", "−")
    note(axes, 0.03, 0.04, words)
    axes.set_ylim(0.2, 1.3)


def _masked(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="d  Masked where rewards tie", x="probability of a right answer", y="nats")
    rows = rows.sort_values("success")
    some = rows.drop_duplicates("success")
    axes.plot(some["success"], some["kl"], color=INK, linewidth=1.3, label="KL(π‖ref)")
    for size, line in ((8, ":"), (4, "-."), (2, "--"), (1, "-")):
        mine, label = select(rows, group_size=size), f"read in groups of {size}" + (": 0" if size == 1 else "")
        axes.plot(mine["success"], mine["read"], color=SHADES[size], linestyle=line, linewidth=1.2, label=label)
    axes.legend(frameon=False, fontsize=6.2, loc="upper center", labelspacing=0.25)
    axes.set_ylim(-0.13, 0.82)
    axes.axhline(0, color=FAINT, linewidth=0.5)


def _noise(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="e  Noise of k1, k2, k3 along a run", x="KL(π‖ref), nats", y="std of one rollout ÷ KL")
    for name, words, at, offset in (
        ("k1-loss", "k1 (thin line: √(2/KL))", 0, (5, 2)),
        ("k2-loss", "k2", 0, (0, -10)),
        ("k3-loss", "k3", -1, (-12, 2)),
    ):
        mine, style = select(rows, estimator=name).sort_values("kl"), look(name).plot()
        x, y = mine["kl"].to_numpy(), (mine["std"] / mine["kl"]).to_numpy()
        axes.loglog(x, y, **style)
        label(axes, words, (x[at], y[at]), offset, style["color"])
        if name == "k2-loss":
            bias = ((mine["mean"] - mine["kl"]).abs() / mine["kl"]).to_numpy()
            axes.loglog(x, bias, color=style["color"], linestyle=":", linewidth=1.1)
            label(axes, "bias of k2 (others: 0)", (x[2], bias[2]), (0, -11), style["color"])
    x = rows["kl"].sort_values().unique()
    axes.loglog(x, (2 / x) ** 0.5, color=INK, linewidth=0.7)


def _means(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="f  Three “KLs per token”", x="updates", y="nats per token")
    k1, k3 = (select(rows, estimator=name).set_index("step").sort_index() for name in ("k1-loss", "k3-loss"))
    x = k1.index
    for values, words, style, at, offset in (
        (k3["over_own_length"], "E[Σk3/L]", {"color": WRONG}, -4, (-30, 4)),
        (k1["kl_per_token"], "E[Σu]/E[L]", {"color": INK}, -1, (-44, 4)),
        (k1["over_own_length"], "E[Σu/L]", {"color": RIGHT, "linestyle": "--"}, 5, (7, -8)),
    ):
        axes.semilogx(x, values, linewidth=1.2, marker=".", markersize=3, **style)
        label(axes, words, (x[at], values.iloc[at]), offset, style["color"])
    below = k1["over_own_length"]
    label(axes, "below zero", (below.idxmin(), below.min()), (14, -5), RIGHT)
    axes.axhline(0, color=FAINT, linewidth=0.5)
    axes.set_ylim(-0.2, 1.7)
