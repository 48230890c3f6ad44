"""Distance from π* at which noisy training settles, by batch size: bias of the fixed point, and noise that cancels."""

from .style import PAGE_WIDTH, Axes, DataFrame, Figure, label, look, note, select, tidy

READS = ("coefficients",)
PANELS = {
    "a  Unbiased: noise alone": {
        "k1-both": "k1 in both places",
        "rao-blackwell": "Rao–Blackwell",
        "k1-reward": "k1 in the reward",
        "leave-one-out": "k1 less the others' mean",
    },
    "b  Biased against unbiased": {
        "k1-both": "k1 in both places",
        "rao-blackwell": "Rao–Blackwell",
        "k3-loss": "token k3, biased",
        "k2-loss": "token k2, biased",
    },
}
BELOW = ("k2-loss",)  # whose label would hide another's
SILENT = 1e-20  # rounding: noise that is zero, for which a logarithmic axis has no place


def draw(rows: DataFrame) -> Figure:
    budget = select(rows, "budget", seed=0)
    figure = Figure(figsize=(PAGE_WIDTH, 2.7), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (title, names) in zip(panels, PANELS.items(), strict=True):
        _panel(axes, budget, title, names)
    notes = ((0.3, "lines: η·tr Cov/(4βB), no fit; zero for the lowest\nbars: two standard errors"),
             (0.04, "lines: the fixed point's\nKL(π‖π*), and noise"))  # fmt: skip
    for axes, (height, words) in zip(panels, notes, strict=True):
        note(axes, 0.03, height, words)
    return figure


def _panel(axes: Axes, rows: DataFrame, title: str, names: dict[str, str]) -> None:
    tidy(axes, title=title, x="rollouts per update B", y="KL(π‖π*) where training settles, nats")
    sizes = sorted(rows["batch_size"].unique())
    for name, words in names.items():
        mine = select(rows, estimator=name).sort_values("batch_size")
        if mine.empty:
            continue
        x, y, error = mine["batch_size"], mine["kl_to_optimum"], 2 * mine["standard_error"]
        # A bar that would reach zero ends at a tenth of the mean.
        style = look(name).plot(linestyle="none", markersize=4)
        axes.errorbar(x, y, [error.clip(upper=0.9 * y), error], capsize=1.5, elinewidth=0.7, **style)
        # KL(fixed point‖π*) + η·tr Cov/(4βB), at β = 1.
        foreseen = mine["predicted_bias"] + mine["learning_rate"] * mine["noise"] / (4 * x)
        if foreseen.min() > SILENT:
            axes.plot(x, foreseen, color=look(name).colour, linestyle=look(name).line, linewidth=1.0)
        label(axes, words, (x.iloc[-1], y.iloc[-1]), (6, -11 if name in BELOW else -2), look(name).colour, size=6.4)
    axes.set(xscale="log", yscale="log")
    if sizes:
        axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 2.9)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
