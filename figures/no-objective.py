"""No function has the gradient of a token-level loss: its Jacobian's asymmetry, and the way round a rectangle."""

import math

from .sequence import bands
from .style import FAINT, INK, Axes, DataFrame, Figure, look, panels, select, tidy

READS = ("sequence",)


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (asymmetry, circulation) = panels(2, 2.1)
    _asymmetry(asymmetry, select(rows, "field"))
    _circulation(circulation, select(rows, "circulation", seed=0))
    return figure


def _asymmetry(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  No function has this gradient", x="length T (tokens)", y="‖J − Jᵀ‖ / ‖J + Jᵀ‖")
    bands(axes, rows, "length", "asymmetry")
    axes.set(xscale="log", ylim=(-0.06, 0.95))
    axes.axhline(0, color=look("k1-reward").colour, lw=1.0, label="∇KL: 0")
    axes.legend(loc="upper left", ncols=3)


def _circulation(axes: Axes, rows: DataFrame) -> None:
    """The rectangle, what each field gains along each edge, and their sums."""
    axes.set_title("b  Once round a rectangle")
    axes.set(xlim=(-0.42, 1.42), ylim=(-0.2, 1.62), xlabel="early logit →", ylabel="late logit →", xticks=[], yticks=[])
    axes.spines[["top", "right"]].set_visible(False)
    found = rows.set_index("field")
    local, whole = found.loc["local_reverse_kl"], found.loc["reverse_kl"]
    corners = ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))
    places = ((0.5, 0.18, "center"), (1.03, 0.5, "left"), (0.5, 0.82, "center"), (-0.03, 0.5, "right"))
    for edge, (x, y, side) in enumerate(places):
        arrow = {"arrowstyle": "-|>", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", corners[edge + 1], corners[edge], arrowprops=arrow)
        for row, name, shift in ((local, "k2-loss", 0.09), (whole, "k1-reward", -0.09)):
            text = f"{row['edges'][edge]:+.3f}".replace("-", "−")
            axes.text(x, y + shift, text, ha=side, va="center", color=look(name).colour)
    for y, words, name in (
        (1.57, f"token-level: {local['circulation']:+.3f} = Δp·ΔKL", "k2-loss"),
        (1.38, f"∇KL: {_zero(whole['circulation'])}", "k1-reward"),
    ):
        axes.text(0.5, y, words, ha="center", va="top", color=look(name).colour, weight="bold")
    axes.text(0.5, 0.5, "∫ along each edge", ha="center", va="center", color=FAINT)


def _zero(value: float) -> str:
    return "0" if math.isclose(value, 0, abs_tol=1e-12) else f"{value:+.3f}"
