"""A language model under each KL term: reward along training, and every run at its end."""

from .finetune import FRESH, along, nats, style_of
from .style import Axes, DataFrame, Figure, panels, select, tidy

READS = ("finetune",)


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    rows = select(rows, "committed")
    figure, (reward, ends) = panels(2, 2.3)
    along(reward, rows, "reward_held_out", "a  What is rewarded", "reward, held-out")
    reward.legend(loc="upper left")
    _ends(ends, rows[rows["update"] == rows["update"].max()])
    return figure


def _ends(axes: Axes, last: DataFrame) -> None:
    tidy(axes, title="b  Every run at its end", x="KL(π‖ref), nats", y="gold score, held-out")
    axes.set_xscale("log")
    nats(axes.xaxis)
    for variant in FRESH:
        found = select(last, variant=variant)
        axes.plot(found["kl"], found["gold_held_out"], **{**style_of(variant), "linestyle": "", "markersize": 2.8})
