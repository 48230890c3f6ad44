"""Noise of unbiased KL gradients: where Rao–Blackwell loses, how often, what a baseline does, what is left to gain."""

from .style import FAINT, INK, PAGE_WIDTH, Axes, DataFrame, Figure, label, look, records, select, tidy

PUBLISHED, RATE, NOISE = 0.25, 10.0, 1.0
# Of the estimators computed: the look of a registered one, and how it is called here.
STEPS = (
    ("return", "k1-reward", "k1, whole return"),
    ("to go", "k1-reward-to-go", "k1 to go"),
    ("k3 in both, to go", "k3-both", "k3 in both, to go"),
    ("rao-blackwell", "rao-blackwell", "Rao–Blackwell"),
    ("rao-blackwell, one baseline", "lambda-baseline", "RB, one baseline"),
    ("to go, critic", "k1-reward-immediate", "k1, critic"),
    ("rao-blackwell, critic", "full-loss", "RB, critic"),
)
PARTS = (
    ("visits", "#0b3c66", "which prefixes"),
    ("token", "#f5b26b", "this token"),
    ("future", "#fde0b8", "later ones"),
)
# λ or its rule, and its look.
RULES = (("0", "k1-reward"), ("value", "k3-reward"), ("1", "k3-both"), ("gradient", "rao-blackwell"))


def draw(rows: DataFrame) -> Figure:
    """The pair, rates of failure and the bandit over its training, the ladder by length and its parts."""
    figure = Figure(figsize=(PAGE_WIDTH, 4.7))
    edges = {"left": 0.062, "right": 0.99}
    top = figure.add_gridspec(1, 3, top=0.945, bottom=0.6, wspace=0.3, **edges)
    bottom = figure.add_gridspec(1, 3, top=0.44, bottom=0.095, wspace=0.42, width_ratios=(1, 1.35, 0.95), **edges)
    panels = [figure.add_subplot(row[0, column]) for row in (top, bottom) for column in range(3)]
    _pair(panels[0], select(rows, "pair"))
    _rates(panels[1], select(rows, "rates"))
    _noise(panels[2], select(rows, "noise"))
    _bandit(panels[3], select(rows, "bandit", what="path", rate=RATE))
    ladder = select(rows, "ladder", distance=NOISE, seed=0)
    _ladder(panels[4], ladder)
    _parts(panels[5], ladder)
    return figure


def _pair(axes: Axes, rows: DataFrame) -> None:
    y = "variance of the KL estimate (nats²)"
    tidy(axes, title="a  Two tokens: RB can lose", x="ref's chance of 0 at first", y=y)
    rows = rows.sort_values("reference")
    lines = (("monte_carlo", "k1-reward", "-"), ("rao_blackwell", "rao-blackwell", "-"), ("mixture", "truth", ":"))
    for name, like, line in lines:
        style = look(like).plot(marker="", linestyle=line)
        axes.plot(rows["reference"], rows[name], **style)
        for value in select(rows, reference=PUBLISHED)[name] if name != "mixture" else ():
            axes.plot([PUBLISHED], [value], "o", color=style["color"], ms=4)
            offset = (-3, 5 if name == "rao_blackwell" else 4)
            label(axes, f"{value:.2f}", (PUBLISHED, value), offset, style["color"], size=6.5, ha="right")
    axes.set(ylim=(0, 12), xlim=(0, 1))
    axes.text(0.84, 10.9, "sampled (k1)", ha="right", size=6.5, color=look("k1-reward").colour)
    axes.text(0.9, 5.35, "RB", size=6.5, color=look("rao-blackwell").colour)
    axes.text(0.57, 2.6, "best mixture", size=6.5, color=INK, ha="center")


def _rates(axes: Axes, rows: DataFrame) -> None:
    tidy(
        axes, title="b  At random: how often RB loses", x="logit noise between π and ref", y="share of environments (%)"
    )
    for spread, like in ((4.0, "rao-blackwell"), (1.0, "k1-reward")):
        for column, line, marker in (("value", "-", "o"), ("gradient", "--", "s")):
            by = select(rows, spread=spread).groupby("distance")[[f"{column}_fails", "environments"]].sum()
            share = 100 * by[f"{column}_fails"] / by["environments"]
            axes.plot(share.index, share, **look(like).plot(linestyle=line, marker=marker))
    axes.set(xscale="log", ylim=(-0.4, 10))
    axes.text(0.1, 8.7, "sure policy (logits of spread 4)", size=6.5, color=look("rao-blackwell").colour)
    axes.text(0.1, 7.8, "mild policy (spread 1)", size=6.5, color=look("k1-reward").colour)
    axes.text(0.1, 6.6, "solid: value", size=6.5, color=INK)
    axes.text(0.1, 5.7, "dashed: gradient", size=6.5, color=INK)


def _noise(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Bandit: two different best λ", x="λ in k1 + λ(w − 1)", y="variance / at λ = 0")
    rows = rows.sort_values("lam")
    start = select(rows, lam=0.0).iloc[0]
    for name, like, words, at in (
        ("value", "k3-reward", "value", (2.9, 1.2e3)),
        ("gradient", "rao-blackwell", "gradient", (1.9, 0.55)),
    ):
        axes.plot(rows["lam"], rows[f"{name}_variance"] / start[f"{name}_variance"], **look(like).plot(marker=""))
        axes.text(*at, words, size=6.5, color=look(like).colour, ha="center")
        axes.axvline(start[f"least_noisy_{name}"], color=look(like).colour, lw=0.7, ls=":")
    axes.axhline(1, color=INK, lw=0.5)
    axes.set(yscale="log", ylim=(0.1, 2e4))
    k3 = select(rows, lam=1.0)["value_variance"].iloc[0] / start["value_variance"]
    label(axes, "k3", (1, k3), (0, 4), FAINT, size=6.5, ha="center")


def _bandit(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title=f"d  Bandit: training, rate {RATE:g}", x="update", y="KL(π‖ref) (nats)")
    for rule, like in RULES:
        mine, style = select(rows, rule=rule).sort_values("step"), look(like).plot(marker="")
        axes.fill_between(mine["step"], mine["low"], mine["high"], color=style["color"], alpha=0.15, lw=0)
        axes.plot(mine["step"], mine["kl"], **style)
    axes.set(ylim=(0, 7))
    axes.text(398, 6.4, "λ = 0, and λ best for the value", ha="right", size=6.5, color=look("k1-reward").colour)
    words = "λ = 1 (k3, dashed), and\nλ best for the gradient"
    axes.text(398, 1.35, words, ha="right", size=6.5, color=look("rao-blackwell").colour)


def _ladder(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="e  How far from the least possible", x="length T (tokens)", y="variance / least possible")
    for name, like, words in STEPS:
        mine = select(rows, estimator=name).sort_values("length")
        if mine.empty:
            continue
        axes.plot(mine["length"], mine["over_floor"], **look(like).plot())
        end = tuple(mine.iloc[-1][["length", "over_floor"]])
        label(axes, words, end, (5, 0), look(like).colour, va="center", size=6)
    axes.axhline(1, color=INK, lw=0.8)
    axes.set(yscale="log", xlim=(1.7, 12.6), xticks=(2, 4, 6, 8), yticks=(1, 2, 5, 10, 20), ylim=(0.9, 40))
    axes.set_yticklabels(["1", "2", "5", "10", "20"])
    axes.minorticks_off()


def _parts(axes: Axes, rows: DataFrame) -> None:
    longest = rows["length"].max()
    tidy(axes, title=f"f  What is random, T = {longest}", x="variance / ‖∇KL‖²")
    shown = [(words, row) for name, _, words in STEPS for row in records(select(rows, estimator=name, length=longest))]
    for at, (_, row) in enumerate(shown):
        left = 0.0
        for part, colour, _ in PARTS:
            axes.barh(at, row[part], left=left, color=colour, height=0.7, edgecolor="white", lw=0.4)
            left += row[part]
    axes.set_yticks(range(len(shown)), [words for words, _ in shown], size=6)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    handles = [axes.barh(0, 0, color=colour, label=words) for _, colour, words in PARTS]
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=6.5, title="left to chance",
        title_fontsize=6.5)  # fmt: skip
