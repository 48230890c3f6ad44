"""Effects of masks of ties and std-normalisation: the gradient lost, the push of a tied group, the end."""

from .style import FAINT, PAGE_WIDTH, Axes, DataFrame, Figure, band, label, look, select, tidy

SHADES = {1: "#fdbb84", 2: "#fc8d59", 3: "#ef6548", 4: "#d7301f", 8: "#990000", 16: "#4d0000"}
MARKERS = {1: "x", 2: "s", 3: "<", 4: "^", 8: "o", 16: "D"}
SHOWN = 0.1  # the reference whose ends are drawn
ENDS = {
    "k2-loss-sequence": "not masked: π*",
    "tied-groups-masked": "masked",
    "group-std": "std-normalised, where stopped",
}


def draw(rows: DataFrame) -> Figure:
    figure = Figure(figsize=(PAGE_WIDTH, 2.35), layout="constrained")
    lost, push, end = figure.subplots(1, 3, width_ratios=(1.1, 0.9, 1.1))
    _lost(lost, select(rows, "masking"))
    _push(push, select(rows, "std"))
    _end(end, select(rows, "training", batch_size=0))
    return figure


def _lost(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  Masked ties take gradient", x="probability of a right answer", y="share of ∇KL that is lost")
    for size, mine in rows.groupby("group_size"):
        line = {"color": SHADES.get(size, FAINT), "marker": MARKERS.get(size, ".")}
        lost = band(axes, mine, "success", "lost", alpha=0.18, markersize=3, linewidth=1.1, **line)["mean"]
        middle = (lost.index[len(lost) // 2], lost.iloc[len(lost) // 2])
        label(axes, f"groups of {size}", middle, (3, 4), line["color"])
    axes.set(xlim=(0, 1), ylim=(-0.03, 1.12))


def _push(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  A tied group's push", x="coefficient β", y="length of the expected step")
    for name, estimator, words, at, offset in (
        ("normalised", "group-std", "divided by the\ngroup's std", -3, (2, -20)),
        ("plain", "group-mean", "plain", -3, (14, -10)),
    ):
        size = rows.groupby("push")[name].mean()
        axes.loglog(size.index, size, **look(estimator).plot())
        label(axes, words, (size.index[at], size.iloc[at]), offset, look(estimator).colour, ha="center")
    axes.axvline(1e-4, color=FAINT, linewidth=0.6, linestyle=":")
    label(axes, "ε in the\ndivision", (1e-4, axes.get_ylim()[0]), (4, 5), size=6)


def _end(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Where exact training ends", x="coefficient β", y="KL(π‖ref) at the end, nats")
    for name, words in ENDS.items():
        mine = select(rows, estimator=name, success=SHOWN).sort_values("beta")
        style = look(name).plot(linestyle="none" if name == "group-std" else look(name).line)
        axes.plot(mine["beta"], mine["kl"], label=words, **style)
    axes.set(xscale="log", yscale="log")
    ticks = sorted(rows["beta"].unique())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=axes.get_ylim()[0] / 5)  # room for the legend
    axes.legend(frameon=False, fontsize=6.2, loc="lower left")
