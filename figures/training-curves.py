"""Training curves of naive, partial, last-token and correct gradients: KL and what was asked for, in several draws."""

from importlib import import_module

from matplotlib.lines import Line2D

from .style import FAINT, PAGE_WIDTH, Axes, DataFrame, Figure, look, select, tidy

ENVIRONMENTS = {"sequence": "sequences of 4 tokens", "mdp": "MDP, 4 steps"}
SETTINGS = import_module("..experiments.training-curves.experiment", __package__)
# The kinds of gradient, before the colon, are the experiment's; how an estimator is called is the style's. Without a
# penalty training goes as with k1 in the loss, whose expected gradient is zero.
KINDS = {name: words.partition(":")[0] for name, words in SETTINGS.GRADIENTS.items() if name != "none"}
KL, LOST = "KL(π‖ref), nats", "J − J of the correct gradient"


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure = Figure(figsize=(PAGE_WIDTH, 3.1), layout="constrained")
    axes = figure.subplots(2, len(ENVIRONMENTS), sharex=True)
    for column, (environment, title) in enumerate(ENVIRONMENTS.items()):
        here = select(rows, environment=environment).pivot(
            index="update", columns=["estimator", "seed"], values=["kl", "objective"]
        )
        kl, objective = here["kl"], here["objective"]
        tidy(axes[0, column], title=title, y=KL * (column == 0))
        tidy(axes[1, column], x="updates", y=LOST * (column == 0))
        for name in KINDS:
            _curves(axes[0, column], kl[name], name)
            _curves(axes[1, column], objective[name] - objective[SETTINGS.CORRECT], name)
        axes[0, column].set_ylim(bottom=0)
        axes[1, column].axhline(0, color=FAINT, lw=0.5)
    lines = [Line2D([], [], **look(name).plot()) for name in KINDS]
    words = [": ".join(dict.fromkeys((kind, look(name).words))) for name, kind in KINDS.items()]
    figure.legend(lines, words, loc="outside lower center", ncols=3, handlelength=3)
    return figure


def _curves(axes: Axes, draws: DataFrame, name: str) -> None:
    """A thin line for each draw, and their mean."""
    axes.plot(draws.index, draws, color=look(name).colour, linewidth=0.4, alpha=0.45)
    axes.plot(draws.index, draws.mean(axis=1), **look(name).plot(markevery=0.25))
