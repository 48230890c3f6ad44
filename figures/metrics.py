"""Ways in which a logged KL is none: changed in place, steered by, noisy, averaged over rollouts."""

from .style import FAINT, INK, ORDER, Axes, DataFrame, Figure, label, look, panels, select, tidy

WRONG = ORDER(0.5)
RIGHT = look("k1-reward").colour
SHOWN_BETA = 0.5  # of the record changed in place: that of the text


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (mutation, controller, noise, means) = panels(4, 4.6)
    _mutation(mutation, select(rows, "mutation"))
    _controller(controller, select(rows, "controller", seed=0))
    logged = select(rows, "logged")
    logged = select(logged, beta=logged["beta"].min(), seed=0)
    _noise(noise, logged)
    _means(means, logged)
    return figure


def _mutation(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  Recorded, then changed in place", x="updates", y="nats")
    rows = select(rows, beta=SHOWN_BETA, seed=0).sort_values("step")
    x, last = rows["step"], rows.iloc[-1]
    axes.plot(x, rows["kl"], color=INK, linewidth=1.3)
    axes.plot(x, rows["recorded"], ".", color=INK, markersize=3, markevery=6)
    axes.plot(x, rows["read"], color=WRONG, linestyle="--", linewidth=1.3)
    for row_of, words, offset, colour in (
        ("kl", "KL(π‖ref), and what\nis recorded (dots)", (0, 4), INK),
        ("read", "what is read afterwards:\nthe objective E[R] − β·KL", (0, 4), WRONG),
    ):
        label(axes, words, (last["step"], last[row_of]), offset, colour, ha="right")
    axes.set_ylim(-0.08, 1.4 * last["read"])


def _controller(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  A β that adapts to it", x="rounds of the controller", y="KL(π‖ref), nats")
    drawn = (
        ("kl", 1.0, {"color": RIGHT}, "reads the KL: on target", 0.98, (0, -11)),
        ("k2", 1.0, {"color": look("k2-loss").colour, "linestyle": "-."}, "reads k₂", 0.98, (0, 3)),
        ("mutated", -1.0, {"color": WRONG, "linestyle": ":"}, "reads what was changed, rewards − 1", 0.98, (0, 3)),
        ("mutated", 1.0, {"color": WRONG, "linestyle": "--"}, "reads what was changed,\nrewards + 1", 0.2, (4, 0)),
    )
    for read, offset, style, words, place, shift in drawn:
        mine = select(rows, read=read, offset=offset).sort_values("round")
        if mine.empty:
            continue
        axes.semilogy(mine["round"], mine["kl"], linewidth=1.2, **style)
        at = tuple(mine.iloc[round(place * (len(mine) - 1))][["round", "kl"]])
        label(axes, words, at, shift, style["color"], ha="right" if place > 0.9 else "left")
    axes.set_ylim(2e-3, 2)


def _noise(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Noise of k₁, k₂, k₃ along a run", x="KL(π‖ref), nats", y="std of one rollout ÷ KL")
    for name, words, at, offset in (
        ("k1-loss", "k₁ (thin line: √(2/KL))", 0, (6, 2)),
        ("k2-loss", "k₂", 0, (0, -11)),
        ("k3-loss", "k₃", -1, (-14, 0)),
    ):
        mine, style = select(rows, estimator=name).sort_values("kl"), look(name).plot()
        x, y = mine["kl"].to_numpy(), (mine["std"] / mine["kl"]).to_numpy()
        axes.loglog(x, y, **style)
        label(axes, words, (x[at], y[at]), offset, style["color"])
        if name == "k2-loss":
            bias = ((mine["mean"] - mine["kl"]).abs() / mine["kl"]).to_numpy()
            axes.loglog(x, bias, color=style["color"], linestyle=":", linewidth=1.1)
            label(axes, "bias of k₂ (others: 0)", (x[2], bias[2]), (0, -14), style["color"])
    axes.set_ylim(top=30)
    x = rows["kl"].sort_values().unique()
    axes.loglog(x, (2 / x) ** 0.5, color=INK, linewidth=0.7)


def _means(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="d  Three “KLs per token”", x="updates", y="nats per token")
    k1, k3 = (select(rows, estimator=name).set_index("step").sort_index() for name in ("k1-loss", "k3-loss"))
    x = k1.index
    for values, words, style, at, offset, side in (
        (k3["over_own_length"], "E[Σk₃/L]", {"color": look("k3-loss").colour}, -1, (0, 4), "right"),
        (k1["kl_per_token"], "E[Σu]/E[L]", {"color": INK}, -1, (0, 4), "right"),
        (k1["over_own_length"], "E[Σu/L]", {"color": RIGHT, "linestyle": "--"}, 5, (7, -8), "left"),
    ):
        axes.semilogx(x, values, linewidth=1.2, marker=".", markersize=3, **style)
        label(axes, words, (x[at], values.iloc[at]), offset, style["color"], ha=side)
    below = k1["over_own_length"]
    label(axes, "below zero", (below.idxmin(), below.min()), (14, -5), RIGHT)
    axes.axhline(0, color=FAINT, linewidth=0.5)
    axes.set_ylim(-0.25, 1.8)
