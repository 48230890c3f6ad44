"""Distillation: mass outside of the teacher's likeliest tokens, what is lost beside a reward, and noise."""

from .style import FAINT, INK, ORDER, PAGE_WIDTH, RIGHT_INK, Axes, DataFrame, Figure, label, select, tidy

K = 4
FORMS = {
    "sampled token": "sampled token, to go",
    "reverse": "reverse KL",
    "forward": "forward KL",
    "jensen-shannon": "Jensen–Shannon",
    "advantage": "KL in the advantage",
    "forward top": "forward, teacher's k",
    "forward top, clamped": "… clamped",
    "forward top, renormalised": "… renormalised",
    "forward top, tail": "… with a tail",
    "reverse top": "reverse, teacher's k",
    "reverse own": "reverse, student's k",
    "reverse own, tail": "… with a tail",
}
TEACHERS = {"far": ("^", 0.95), "peaked": ("o", 0.55), "broad": ("s", 0.25)}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure = Figure(figsize=(PAGE_WIDTH, 3.1), layout="constrained")
    outside, lost, noise = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    ends = select(rows, "ends", k=K, environment="bandit")
    _dots(outside, select(ends, beta=0.0), "outside")
    tidy(outside, title="a  Alone", x="mass outside")
    _dots(lost, select(ends, beta=lambda beta: beta > 0), "gap")
    tidy(lost, title="b  Beside a reward", x="below the optimum")
    lost.set_yticklabels([])
    _noise(noise, select(rows, "noise", environment="sequence"))
    for axes in (outside, lost):
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(FORMS) - 0.4, -0.6)
    figure.legend(*noise.get_legend_handles_labels(), ncols=3, loc="outside lower center", handlelength=1.8)
    return figure


def _dots(axes: Axes, rows: DataFrame, column: str) -> None:
    """A line for each loss: its range over draws, and the mean with each teacher."""
    for place, name in enumerate(FORMS):
        mine = select(rows, form=name)
        if mine.empty:
            continue
        colour = RIGHT_INK if name in ("sampled token", "reverse", "forward", "jensen-shannon") else ORDER(0.5)
        axes.plot([mine[column].min(), mine[column].max()], [place, place], color=FAINT, linewidth=0.7, zorder=1)
        for teacher, (marker, _) in TEACHERS.items():
            mean = select(mine, teacher=teacher)[column].mean()
            axes.plot(mean, place, marker, color=colour, markersize=3.2, markerfacecolor="none", markeredgewidth=0.7)
            if column == "outside":
                own = select(mine, teacher=teacher)["teacher_outside"].mean()
                axes.plot(own, place, "|", color=INK, markersize=5, markeredgewidth=0.7)
    axes.set_yticks(range(len(FORMS)), list(FORMS.values()))


def _noise(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Sampled over exact", x="share of the way from the start", y="ratio of variances")
    rows = rows.assign(ratio=rows["variance of sampled token"] / rows["variance of reverse"])
    for rewarded in (False, True):
        for teacher, (marker, shade) in TEACHERS.items():
            mine = select(rows, teacher=teacher, rewarded=rewarded)
            # At the teacher both vanish.
            mean = select(mine, place=lambda place: place < 1).groupby("place")["ratio"].mean()
            if rewarded:
                mean = mine.groupby("place")["ratio"].mean()
            line = {"label": f"{teacher} teacher"} if rewarded else {}
            axes.semilogy(mean.index, mean, marker + "-", color=ORDER(shade), markersize=3, linewidth=1.1, **line)
    axes.axhline(1, color=INK, linewidth=0.6, linestyle=":")
    label(axes, "alone", (0.02, 48), (0, 6))
    label(axes, "beside a reward", (0.02, 0.3), (0, -4))
    axes.set_ylim(0.12, 150)
