"""The part that a token-level loss misses on sequences: by length, steering and discount, and at a blind root."""

from typing import Any

from .style import INK, ORDER, Axes, DataFrame, Figure, band, label, look, name_ends, note, panels, select, tidy

# Steerings that are drawn of all that were computed.
SHOWN = (0.0, 0.5, 0.75, 0.9, 0.99)


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (length, steering, discount, root) = panels(4, 3.6)
    _length(length, select(rows, "length"))
    _steering(steering, select(rows, "length"))
    _discount(discount, select(rows, "credit"))
    _root(root, select(rows, "root"))
    return figure


def _shade(steering: float) -> Any:
    """Darker for stronger steering."""
    return ORDER(steering**2)


def bands(axes: Axes, rows: DataFrame, by: str, quantity: str) -> list[tuple[str, Any, Any]]:
    """A line for each steering: the mean over draws, and all draws as a band; return how each ends."""
    ends = []
    for steering, mine in select(rows, steering=SHOWN).groupby("steering"):
        mean = band(axes, mine, by, quantity, alpha=0.2, color=_shade(steering), lw=1.2, marker="o", ms=2)["mean"]
        ends.append((f"κ = {steering:g}", (mean.index[-1], mean.iloc[-1]), _shade(steering)))
    return ends


def _length(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  What is missed, by length", x="length T (tokens)", y="‖missed part‖ / ‖∇KL‖")
    ends = bands(axes, rows, "length", "missed")
    axes.set(xscale="log", ylim=(-0.06, 1.45), xlim=(None, 6 * rows["length"].max()))
    name_ends(axes, ends)
    note(axes, 0.03, 0.97, "band: all draws", va="top")


def _steering(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  Direction that is left", x="steering κ", y="cosine with ∇KL")
    style = {"color": look("k2-loss").colour, "lw": 1.2, "marker": "s", "ms": 2.4}
    for length, line in ((2, ":"), (10, "--"), (rows["length"].max(), "-")):
        mine = select(rows, length=length)
        if len(mine):
            band(axes, mine, "steering", "cosine", alpha=0.15, ls=line, label=f"T = {length:,}", **style)
    axes.axhline(0, color=INK, lw=0.6)
    axes.axhline(1, color=look("k1-reward").colour, lw=1.0)
    axes.text(0.0, 1.05, look("k1-reward-to-go").words, color=look("k1-reward").colour)
    axes.text(0.0, -0.06, "below: against ∇KL", va="top")
    axes.legend(title="k₂ in the loss", loc=(0.02, 0.31), labelspacing=0.2, handlelength=2.4)
    axes.set_ylim(-0.5, 1.25)


def _discount(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  Discounting the KL to come", x="discount γ, or λ of a GAE without critic", y="relative bias")
    alone = select(rows, steering=SHOWN[1:])
    bands(axes, alone, "discount", "bias")
    for steering, mine in alone.groupby("steering"):
        start = mine.groupby("discount")["bias"].mean()
        label(axes, f"κ = {steering:g}", (start.index[0], start.iloc[0]), (3, 4), _shade(steering))
    axes.set(ylim=(-0.04, 1.6))
    words = "γ = 0: token-level;  γ = 1: ∇KL\na critic that knows a share α\nof it: 1 − α times this"
    note(axes, 0.98, 0.97, words, ha="right", va="top")


def _root(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="d  The blind root", x="chance p of the token before the KL", y="∂/∂logit at the root, in d")
    chances = [step / 100 for step in range(101)]
    axes.plot(chances, [p * (1 - p) for p in chances], color=INK, lw=0.9)
    label(axes, "truth: p(1 − p)·d", (0.5, 0.25), (0, 4), ha="center")
    names = list(rows["estimator"].unique())
    for name in names:
        mine = select(rows, estimator=name, departure=rows["departure"].max())
        style = look(name).plot(linestyle="", markersize=4, markerfacecolor="none")
        axes.plot(mine["chance"], mine["found"] / mine["kl"], **style)
        if name == "k1-reward-to-go":
            label(axes, look(name).words, (0.5, 0.17), (0, 0), style["color"], ha="center")
    blind = [name for name in names if name != "k1-reward-to-go"]
    words = sorted((look(name).words for name in blind), key=len)
    axes.text(0.5, 0.015, ", ".join(words[:2]) + ",\n" + ",\n".join(words[2:]) + ": 0", ha="center", va="bottom")
    axes.set_ylim(-0.02, 0.32)
