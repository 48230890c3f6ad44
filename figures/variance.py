"""Noise of unbiased KL gradients: where Rao–Blackwell loses, how often, and what is left to gain."""

from .style import (
    FAINT,
    INK,
    Axes,
    DataFrame,
    Figure,
    Look,
    label,
    look,
    name_ends,
    note,
    panels,
    records,
    select,
    tidy,
)

PUBLISHED, NOISE = 0.25, 1.0
# Of the estimators computed: the look, and how it is called here.
STEPS = (
    ("return", look("k1-reward"), "k₁ in the reward"),
    ("to go", look("k1-reward-to-go"), "k₁ to go"),
    ("k3 in both, to go", look("k3-both"), "k₃ in both, to go"),
    ("rao-blackwell", look("rao-blackwell"), "Rao–Blackwell (RB)"),
    ("rao-blackwell, one baseline", look("lambda-baseline"), "RB, one baseline"),
    ("to go, critic", Look("#117733", "--", "<"), "k₁ to go, critic"),
    ("rao-blackwell, critic", Look("#999933", "-", "h"), "RB, critic"),
)
PARTS = (
    ("visits", "#0b3c66", "which prefixes"),
    ("token", "#7fb2d9", "this token"),
    ("future", "#d5e6f3", "later ones"),
)


def draw(rows: DataFrame) -> Figure:
    """The pair, rates of failure, the ladder by length and its parts."""
    figure, (pair, rates, steps, parts) = panels(4, 4.2)
    _pair(pair, select(rows, "pair"))
    _rates(rates, select(rows, "rates"))
    ladder = select(rows, "ladder", distance=NOISE, seed=0)
    _ladder(steps, ladder)
    _parts(parts, ladder)
    return figure


def _pair(axes: Axes, rows: DataFrame) -> None:
    y = "variance of the value, nats²"
    tidy(axes, title="a  Two tokens: RB can lose", x="ref's chance of 0 at first", y=y)
    rows = rows.sort_values("reference")
    lines = (("monte_carlo", "k1-reward", "-"), ("rao_blackwell", "rao-blackwell", "-"), ("mixture", "truth", ":"))
    for name, like, line in lines:
        style = look(like).plot(marker="", linestyle=line)
        axes.plot(rows["reference"], rows[name], **style)
        for value in select(rows, reference=PUBLISHED)[name] if name != "mixture" else ():
            axes.plot([PUBLISHED], [value], "o", color=style["color"], ms=4)
            offset = (-3, 5 if name == "rao_blackwell" else 4)
            label(axes, f"{value:.2f}", (PUBLISHED, value), offset, style["color"], ha="right")
    axes.set(ylim=(0, 12), xlim=(0, 1))
    axes.text(0.84, 10.9, "sampled (k₁)", ha="right", color=look("k1-reward").colour)
    axes.text(0.9, 5.35, "RB", color=look("rao-blackwell").colour)
    axes.text(0.57, 2.6, "best mixture", color=INK, ha="center")


def _rates(axes: Axes, rows: DataFrame) -> None:
    tidy(
        axes, title="b  At random: how often RB loses", x="logit noise between π and ref", y="share of environments, %"
    )
    for spread, colour in ((4.0, INK), (1.0, FAINT)):
        for column, line, marker in (("value", "-", "o"), ("gradient", "--", "s")):
            by = select(rows, spread=spread).groupby("distance")[[f"{column}_fails", "environments"]].sum()
            share = 100 * by[f"{column}_fails"] / by["environments"]
            axes.plot(share.index, share, **Look(colour, line, marker).plot())
    axes.set(xscale="log", ylim=(-0.4, 1.6 * axes.get_ylim()[1]))
    note(axes, 0.03, 0.9, "sure policy (logits of spread 4)")
    note(axes, 0.03, 0.82, "mild policy (spread 1)", color=FAINT)
    note(axes, 0.03, 0.63, "solid: value\ndashed: gradient")


def _ladder(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  How far from the least possible", x="length T (tokens)", y="variance / least possible")
    ends = []
    for name, like, words in STEPS:
        mine = select(rows, estimator=name).sort_values("length")
        axes.plot(mine["length"], mine["over_floor"], **like.plot())
        ends += [(words, tuple(one), like.colour) for one in mine[["length", "over_floor"]].to_numpy()[-1:]]
    axes.axhline(1, color=INK, lw=0.8)
    axes.set(yscale="log", xlim=(1.7, 14), xticks=(2, 4, 6, 8), yticks=(1, 2, 5, 10, 20), ylim=(0.9, 40))
    axes.set_yticklabels(["1", "2", "5", "10", "20"])
    axes.minorticks_off()
    name_ends(axes, ends)


def _parts(axes: Axes, rows: DataFrame) -> None:
    longest = rows["length"].max()
    tidy(axes, title=f"d  What is random, T = {longest}", x="variance / ‖∇KL‖²")
    shown = [(words, row) for name, _, words in STEPS for row in records(select(rows, estimator=name, length=longest))]
    for at, (_, row) in enumerate(shown):
        left = 0.0
        for part, colour, _ in PARTS:
            axes.barh(at, row[part], left=left, color=colour, height=0.7, edgecolor="white", lw=0.4)
            left += row[part]
    axes.set_yticks(range(len(shown)), [words for words, _ in shown])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles = [axes.barh(0, 0, color=colour, label=words) for _, colour, words in PARTS]
    axes.legend(handles=handles, loc="lower right", title="left to chance")
