"""A language model under each KL term, free length: gold score against mean length, of every run and at equal KL."""

import numpy as np

from .finetune import TERMS, at_ends, style_of
from .style import ORDER, Axes, DataFrame, Figure, panels, select, tidy

READS = ("finetune",)
# Terms that hold a policy back, which are compared, and the KLs at which they are, in nats.
COMPARED = ("leave-one-out", "k2-loss", "k3-loss")
LEVELS = (2.5, 3, 4, 5)


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    ends = select(at_ends(rows), task="free", variant=COMPARED)
    figure, (runs, equal) = panels(2, 2.5)
    for axes, title in ((runs, "a  Every run at its end"), (equal, "b  At equal KL")):
        tidy(axes, title=title, x="mean length, tokens", y="gold score, held-out")
    for term in COMPARED:
        own = select(ends, variant=term)
        runs.plot(
            own["length_held_out"], own["gold_held_out"], label=TERMS[term], **{**style_of(term), "linestyle": ""}
        )
    runs.legend(loc="upper right")
    _at_equal_kl(equal, ends)
    equal.sharex(runs)
    equal.sharey(runs)
    return figure


def _at_equal_kl(axes: Axes, ends: DataFrame) -> None:
    """For each KL the means of length and gold score under each term, over the seeds in which all terms reach it."""
    for number, level in enumerate(LEVELS):
        colour, found = ORDER(number / (len(LEVELS) - 1)), []
        for _, own in ends.groupby("seed"):
            reached = [_at(select(own, variant=term), np.log(level)) for term in COMPARED]
            if None not in reached:
                found.append(reached)
        if found:
            points = np.mean(found, axis=0)  # terms, (length, gold score)
            axes.plot(*points.T, color=colour, linewidth=0.9, label=f"{level:g} nats")
            for term, point in zip(COMPARED, points, strict=True):
                axes.plot(*point, **{**style_of(term), "color": colour, "linestyle": ""})
    axes.legend(loc="upper right")


def _at(own: DataFrame, log: float) -> tuple[float, float] | None:
    """Length and gold score of a seed's curve at a log KL, linear between its end points; None if it is not reached."""
    own = own.sort_values("kl")
    logs = np.log(own["kl"].to_numpy(float))
    if not logs[0] <= log <= logs[-1]:
        return None
    length, gold = (float(np.interp(log, logs, own[name])) for name in ("length_held_out", "gold_held_out"))
    return length, gold
