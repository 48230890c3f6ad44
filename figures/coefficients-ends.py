"""The distance from π* at which training with each coefficient ends."""

from typing import Any

from .coefficients import ENVIRONMENTS, SHOWN, first, key, style_of
from .style import PAGE_WIDTH, Axes, DataFrame, Figure, look, select, tidy

READS = ("coefficients",)
SMALLEST = 1e-8  # what is nearer than this is drawn here, and called 0


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure = Figure(figsize=(PAGE_WIDTH, 2.6))
    axes = figure.subplots(1, 3, sharey=True)
    figure.subplots_adjust(left=0.092, right=0.985, top=0.91, bottom=0.38, wspace=0.12)
    for column, (environment, title) in enumerate(ENVIRONMENTS.items()):
        _distance(axes[column], select(rows, environment=environment), title)
        if column:
            axes[column].set_ylabel("")
    key(figure, 0.01)
    return figure


def _distance(axes: Axes, rows: DataFrame, title: str) -> None:
    tidy(axes, title=title, x="coefficient β", y="KL(π‖π*) at the end, nats")
    for name in SHOWN:
        mine = first(rows, name)
        # A run that diverged ended nowhere: the line has a gap there.
        ends = mine["kl_to_optimum"].astype(float).clip(lower=SMALLEST).where(mine["diverged"] == 0)
        axes.plot(mine["beta"], ends, **style_of(name))
        foreseen = mine[mine["predicted_kl_to_optimum"] > SMALLEST]
        circles = {"linestyle": "none", "marker": "o", "markersize": 6, "markerfacecolor": "none", "alpha": 0.8}
        options: dict[str, Any] = {"color": look(name).colour, "markeredgewidth": 0.5, **circles}
        axes.plot(foreseen["beta"], foreseen["predicted_kl_to_optimum"], **options)
    axes.set(xscale="log", yscale="log", ylim=(SMALLEST / 2, 30))
    axes.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1], ["0", "10⁻⁶", "10⁻⁴", "0.01", "1"])
    axes.minorticks_off()
