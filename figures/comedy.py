"""Bias and noise of KL gradients by length, near the reference and away from it; where the order changes."""

from .style import INK, Axes, DataFrame, Figure, look, note, panels, select, tidy

READS = ("differentiate-the-estimate",)
# Estimator and placement as computed, and the registered name whose look they share.
SHOWN = (
    (("k1-loss", "loss"), "k1-loss"),
    (("k1-loss", "reward"), "k1-reward"),
    (("k3-loss", "loss"), "k3-loss"),
    (("k3-loss", "reward"), "k3-reward"),
    (("k3-loss", "both"), "k3-both"),
)


def draw(rows: DataFrame) -> Figure:
    """Bias over noise, near and far; one pair at all lengths over the distance of equal noise."""
    figure, axes = panels(6, 5.0)
    held = select(rows, "length", hold="kl")
    for column, kl in enumerate((held["kl"].min(), held["kl"].max())):
        here = select(held, kl=kl)
        where = f"{('near', 'far')[column]}: KL = {kl:g} nats"
        _lines(axes[column], here, "bias", f"{'ab'[column]}  Bias, {where}", "bias / ‖∇KL‖")
        _lines(axes[column + 2], here, "std", f"{'cd'[column]}  Noise, {where}", "std of one ĝ / ‖∇KL‖")
        axes[column].set_ylim(-0.1, 2.6)
    for one in axes:
        one.set_xticks((5, 10, 15, 20))
    _one_pair(axes[4], select(rows, "length", hold="pair"))
    _equal(axes[5], select(rows, "equal noise"))
    handles = [axes[0].plot([], [], **look(name).plot(), label=look(name).words)[0] for _, name in SHOWN]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=2, columnspacing=1.2)
    return figure


def _lines(axes: Axes, rows: DataFrame, quantity: str, title: str, y: str) -> None:
    tidy(axes, title=title, x="length T (tokens)", y=y)
    for which, name in SHOWN:
        mine = _of(rows, which)
        axes.plot(mine["length"], mine[quantity], **look(name).plot(markevery=3))
    if quantity == "bias":
        axes.axhline(0, color=INK, lw=0.6)
    else:
        axes.set(yscale="log", ylim=(0.2, 8), yticks=(0.2, 0.5, 1, 2, 5))
        axes.set_yticklabels(["0.2", "0.5", "1", "2", "5"])
        axes.minorticks_off()


def _of(rows: DataFrame, which: tuple[str, str]) -> DataFrame:
    return select(rows, estimator=which[0], placement=which[1]).sort_values("length")


def _one_pair(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="e  One pair: the order flips", x="length T (tokens)", y="std of one ĝ / ‖∇KL‖")
    furthest = select(rows, kl=rows["kl"].max())
    for which, name in SHOWN[:2]:
        mine = _of(furthest, which)
        axes.plot(mine["length"], mine["std"], **look(name).plot())
    ends = furthest.groupby("length")["rollout_kl"].last()
    said = "\nto ".join(f"{ends.loc[length]:.2f} at T = {length}" for length in (ends.index[0], ends.index[-1]))
    note(axes, 0.98, 0.97, f"KL grows from {said}", ha="right", va="top")


def _equal(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="f  The distance of equal noise", x="length T (tokens)", y="KL(π‖ref), nats")
    known = rows.dropna(subset=["equal_at"]).sort_values("length")
    axes.plot(known["length"], known["equal_at"], color=INK, lw=1.2, marker="o", ms=2.2)
    axes.set_ylim(0, 0.85)
    middle = known["length"].iloc[len(known) // 2]
    axes.text(middle, 0.64, "k₁ in the reward is noisier", ha="center", color=look("k1-reward").colour)
    axes.text(middle, 0.16, "k₁ in the loss is noisier", ha="center", color="#5f5f5f")
