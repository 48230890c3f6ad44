"""The part that a token-level loss misses on sequences, and that no function has its gradient."""

import math
from typing import Any

from .style import BIAS, FAINT, INK, PAGE_WIDTH, Axes, DataFrame, Figure, band, label, look, note, select, tidy


def draw(rows: DataFrame) -> Figure:
    """Six panels: length, steering, discount; the blind root, the Jacobian's asymmetry, the way round a rectangle."""
    figure = Figure(figsize=(PAGE_WIDTH, 4.75))
    panels = figure.subplots(2, 3)
    _length(panels[0, 0], select(rows, "length"))
    _steering(panels[0, 1], select(rows, "length"))
    _discount(panels[0, 2], select(rows, "credit"))
    _root(panels[1, 0], select(rows, "root"))
    _asymmetry(panels[1, 1], select(rows, "field"))
    _circulation(panels[1, 2], select(rows, "circulation", seed=0))
    figure.subplots_adjust(left=0.068, right=0.962, top=0.925, bottom=0.085, wspace=0.46, hspace=0.52)
    return figure


def _shade(steering: float) -> Any:
    """Darker for stronger steering; blue where there is none, and nothing is missed."""
    return look("k1-reward").colour if steering == 0 else BIAS(0.35 + 0.6 * steering**2)


def _band(axes: Axes, rows: DataFrame, by: str, quantity: str, *, named: str = "end", apart: float = 0.0) -> None:
    """A line for each steering: the mean over draws, and all draws as a band; named where it ends or begins.

    Names keep a distance of `apart` in y from each other.
    """
    ends: list[tuple[float, float, float]] = []
    for steering, mine in rows.groupby("steering"):
        mean = band(axes, mine, by, quantity, alpha=0.2, color=_shade(steering), lw=1.2, marker="o", ms=2)["mean"]
        at = -1 if named == "end" else 0
        ends.append((mean.iloc[at], mean.index[at], steering))
    y = -math.inf
    for value, x_at, steering in sorted(ends):
        y = max(y + apart, value)
        offset, text = ((4, 0), f"{steering:g}") if named == "end" else ((2, 4), f"κ = {steering:g}")
        label(axes, text, (x_at, y), offset, _shade(steering), va="center", size=6)
    if named == "end":
        axes.annotate("κ", (1, 1), (-3, -8), xycoords="axes fraction", textcoords="offset points", size=7,
            style="italic")  # fmt: skip


def _length(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  What is missed, by length", x="length T (tokens)", y="‖missed part‖ / ‖∇KL‖")
    _band(axes, rows, "length", "missed", apart=0.075)
    axes.set(xscale="log", ylim=(-0.06, 1.45))
    note(axes, 0.03, 0.97, "band: all draws", size=6, va="top", color=FAINT)


def _steering(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  Direction that is left", x="steering κ", y="cosine with ∇KL")
    style = {"color": look("k2-loss").colour, "lw": 1.2, "marker": "s", "ms": 2.4}
    for length, line in ((2, ":"), (10, "--"), (rows["length"].max(), "-")):
        mine = select(rows, length=length)
        if len(mine):
            band(axes, mine, "steering", "cosine", alpha=0.15, ls=line, label=f"T = {length:,}", **style)
    axes.axhline(0, color=INK, lw=0.6)
    axes.axhline(1, color=look("k1-reward").colour, lw=1.0)
    axes.text(0.0, 1.03, "k1 in the reward, to go", size=6, color=look("k1-reward").colour)
    axes.text(0.0, -0.06, "below: against ∇KL", size=6, va="top")
    axes.legend(title="token-level", title_fontsize=6, fontsize=6, loc=(0.02, 0.40), frameon=False, handlelength=2.4)
    axes.set_ylim(-0.5, 1.15)


def _discount(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Discounting the KL to come", x="discount γ, or λ of a critic-less GAE", y="relative bias")
    alone = select(rows, what="discount", critic=0.0)
    _band(axes, alone[alone["steering"] > 0], "discount", "bias", named="start")
    axes.set(ylim=(-0.04, 1.5))
    words = "γ = 0: token-level\nγ = 1: ∇KL\na critic that knows a share α\nof it: 1 − α times this"
    note(axes, 0.98, 0.97, words, ha="right", va="top", size=6)


def _root(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="d  The blind root", x="chance p of the token before the KL", y="∂/∂logit at the root, in d")
    chances = [step / 100 for step in range(101)]
    axes.plot(chances, [p * (1 - p) for p in chances], color=INK, lw=0.9)
    label(axes, "truth: p(1 − p)·d", (0.5, 0.25), (0, 4), size=6, ha="center")
    names = list(rows["estimator"].unique())
    for name in names:
        mine = select(rows, estimator=name, departure=rows["departure"].max())
        style = look(name).plot(linestyle="", markersize=4, markerfacecolor="none")
        axes.plot(mine["chance"], mine["found"] / mine["kl"], **style)
        if name == "k1-reward-to-go":
            label(axes, name, (0.5, 0.17), (0, 0), style["color"], size=6, ha="center")
    blind = [name for name in names if name != "k1-reward-to-go"]
    axes.text(0.5, 0.022, ", ".join(blind[:2]) + ",\n" + ", ".join(blind[2:]) + ": 0", ha="center", va="bottom", size=6)
    axes.set_ylim(-0.02, 0.3)


def _asymmetry(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="e  No function has this gradient", x="length T (tokens)", y="‖J − Jᵀ‖ / ‖J + Jᵀ‖")
    _band(axes, rows, "length", "asymmetry", apart=0.04)
    axes.set(xscale="log", ylim=(-0.03, 0.75))
    axes.axhline(0, color=look("k1-reward").colour, lw=1.0)
    axes.text(4, 0.015, "∇KL: 0, as of any gradient", size=6, color=look("k1-reward").colour)
    note(axes, 0.03, 0.97, "J: derivatives of the\ntoken-level gradient", size=6, va="top")


def _circulation(axes: Axes, rows: DataFrame) -> None:
    """The rectangle, what each field gains along each edge, and their sums."""
    axes.set_title("f  Once round a rectangle", loc="left", size=7.5, weight="bold")
    axes.set(xlim=(-0.42, 1.42), ylim=(-0.36, 1.36), xlabel="early logit →", ylabel="late logit →", xticks=[],
        yticks=[])  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    found = rows.set_index("field")
    local, whole = found.loc["local_reverse_kl"], found.loc["reverse_kl"]
    corners = ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))
    places = ((0.5, 0.11, "center"), (1.03, 0.5, "left"), (0.5, 0.87, "center"), (-0.03, 0.5, "right"))
    for edge, (x, y, side) in enumerate(places):
        arrow = {"arrowstyle": "-|>", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", corners[edge + 1], corners[edge], arrowprops=arrow)
        for row, name, shift in ((local, "k2-loss", 0.045), (whole, "k1-reward", -0.045)):
            text = f"{row['edges'][edge]:+.3f}".replace("-", "−")
            axes.text(x, y + shift, text, ha=side, va="center", size=6, color=look(name).colour)
    for y, words, name in (
        (1.33, f"token-level: {local['circulation']:+.3f} = Δp·ΔKL", "k2-loss"),
        (1.21, f"∇KL: {_zero(whole['circulation'])}", "k1-reward"),
    ):
        axes.text(0.5, y, words, ha="center", va="top", size=6.2, color=look(name).colour, weight="bold")
    axes.text(0.5, 0.5, "∫ of the gradient\nalong each edge", ha="center", va="center", size=6, color=FAINT)


def _zero(value: float) -> str:
    return "0" if math.isclose(value, 0, abs_tol=1e-12) else f"{value:+.3f}"
