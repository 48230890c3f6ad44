"""Effects of masks of ties and std-normalisation: the gradient lost, the push of a tied group, the end."""

import math

from .style import FAINT, ORDER, PAGE_WIDTH, Axes, DataFrame, Figure, band, label, look, select, tidy

MARKERS = {1: "x", 2: "s", 3: "<", 4: "^", 8: "o", 16: "D"}
SHOWN = 0.1  # the reference whose ends are drawn
ENDS = {"tied-groups-masked": "masked", "k2-loss-sequence": "not masked: π*", "group-std": "divided by the std"}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure = Figure(figsize=(PAGE_WIDTH, 2.3), layout="constrained")
    lost, push, end = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
    _lost(lost, select(rows, "masking"))
    _push(push, select(rows, "std"))
    _end(end, select(rows, "training", batch_size=0))
    return figure


def _lost(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  Masked ties take gradient", x="probability of a right answer", y="share of ∇KL that is lost")
    for size, mine in rows.groupby("group_size"):
        line = {"color": ORDER(math.log2(size) / 4), "marker": MARKERS.get(size, "."), "label": f"{size}"}
        band(axes, mine, "success", "lost", alpha=0.18, markersize=3, linewidth=1.1, **line)
    axes.set(xlim=(0, 1), ylim=(-0.03, 1.52))
    axes.set_xticks((0, 0.5, 1), ["0", "0.5", "1"])
    axes.legend(title="rollouts in a group", ncols=3, loc="upper center", handlelength=1.6, columnspacing=1)
    axes.set_yticks((0, 0.25, 0.5, 0.75, 1), ("0", "0.25", "0.5", "0.75", "1"))


def _push(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  A tied group's push", x="coefficient β", y="length of the expected step")
    for name, estimator, words, at, offset, side in (
        ("normalised", "group-std", "divided by the std", 4, (0, 8), "center"),
        ("plain", "group-mean", "plain", -3, (6, -8), "left"),
    ):
        size = rows.groupby("push")[name].mean()
        axes.loglog(size.index, size, **look(estimator).plot())
        label(axes, words, (size.index[at], size.iloc[at]), offset, look(estimator).colour, ha=side)
    axes.axvline(1e-4, color=FAINT, linewidth=0.6, linestyle=":")
    label(axes, "ε of the division", (1e-4, axes.get_ylim()[0]), (4, 4))
    axes.set_ylim(top=20)


def _end(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Where training ends", x="coefficient β", y="KL(π‖ref) at the end, nats")
    for name, words in ENDS.items():
        mine = select(rows, estimator=name, success=SHOWN).sort_values("beta")
        style = look(name).plot(linestyle="none" if name == "group-std" else look(name).line)
        axes.plot(mine["beta"], mine["kl"], label=words, **style)
    axes.set(xscale="log", yscale="log")
    ticks = [tick for tick in (0.1, 0.3, 1, 3) if rows["beta"].min() <= tick <= rows["beta"].max()]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=axes.get_ylim()[0] / 5)  # room for the legend
    axes.legend(loc="lower left")
