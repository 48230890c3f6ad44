"""Distance from π* at which noisy training settles, by batch size: bias of the fixed point, and noise that cancels."""

from .style import Axes, DataFrame, Figure, look, note, panels, select, tidy

READS = ("coefficients",)
PANELS = {
    "a  Unbiased: noise alone": ("k1-both", "rao-blackwell", "k1-reward", "leave-one-out"),
    "b  Biased against unbiased": ("k1-both", "rao-blackwell", "k3-loss", "k2-loss"),
}
OPEN = ("leave-one-out",)  # in the colour of another
SILENT = 1e-20  # rounding: noise that is zero, for which a logarithmic axis has no place


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    budget = select(rows, "budget", seed=0)
    figure, both = panels(2, 2.6)
    for axes, (title, names) in zip(both, PANELS.items(), strict=True):
        _panel(axes, budget, title, names)
    notes = (
        (0.3, "lines: η·tr Cov/(4βB), no fit; zero for the lowest\nbars: two standard errors"),
        (0.04, "lines: the fixed point's\nKL(π‖π*), and noise"),
    )
    for axes, (height, words) in zip(both, notes, strict=True):
        note(axes, 0.03, height, words)
    return figure


def _panel(axes: Axes, rows: DataFrame, title: str, names: tuple[str, ...]) -> None:
    tidy(axes, title=title, x="rollouts per update B", y="KL(π‖π*) at rest, nats")
    sizes = sorted(rows["batch_size"].unique())
    for name in names:
        mine = select(rows, estimator=name).sort_values("batch_size")
        if mine.empty:
            continue
        x, y, error = mine["batch_size"], mine["kl_to_optimum"], 2 * mine["standard_error"]
        # A bar that would reach zero ends at a tenth of the mean.
        style = look(name).plot(linestyle="none", markersize=4)
        style |= {"markerfacecolor": "none"} if name in OPEN else {}
        reach = [error.clip(upper=0.9 * y), error]
        axes.errorbar(x, y, reach, capsize=1.5, elinewidth=0.7, label=look(name).words, **style)
        # KL(fixed point‖π*) + η·tr Cov/(4βB), at β = 1.
        foreseen = mine["predicted_bias"] + mine["learning_rate"] * mine["noise"] / (4 * x)
        if foreseen.min() > SILENT:
            axes.plot(x, foreseen, color=look(name).colour, linestyle=look(name).line, linewidth=1.0)
    axes.set(xscale="log", yscale="log")
    if sizes:
        axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    axes.set_xticks(sizes[::2], [str(size) for size in sizes[::2]])
    axes.minorticks_off()
    axes.set_ylim(top=30 * axes.get_ylim()[1])
    axes.legend(loc="upper right", ncols=2, columnspacing=0.8, handletextpad=0.3)
