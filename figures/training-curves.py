"""Training curves of naive, partial, last-token and correct gradients: KL, reward and what was asked for, by update."""

from importlib import import_module

from matplotlib.lines import Line2D

from .style import PAGE_WIDTH, Axes, DataFrame, Figure, look, select, tidy

ENVIRONMENTS = {"bandit": "bandit", "sequence": "sequences", "mdp": "MDP"}
# The kinds of gradient, before the colon, are the experiment's; how an estimator is called is the style's.
KINDS = {
    name: words.partition(":")[0]
    for name, words in import_module("..experiments.training-curves.experiment", __package__).GRADIENTS.items()
}
MEASURED = {"kl": "KL(π‖ref), nats", "reward": "E[reward]", "objective": "E[reward] − β·KL(π‖ref)"}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure = Figure(figsize=(PAGE_WIDTH, 4.4), layout="constrained")
    axes = figure.subplots(len(MEASURED), len(ENVIRONMENTS))
    for column, (environment, title) in enumerate(ENVIRONMENTS.items()):
        # One draw: others lie elsewhere, and the claims speak of all of them.
        here = select(rows, environment=environment, seed=0)
        for row, (name, words) in enumerate(MEASURED.items()):
            tidy(axes[row, column], title=title * (row == 0), y=words * (column == 0), x="updates" * (row == 2))
            _curves(axes[row, column], here, name)
    lines = [Line2D([], [], **look(name).plot()) for name in KINDS]
    words = [": ".join(dict.fromkeys((kind, look(name).words))) for name, kind in KINDS.items()]
    figure.legend(lines, words, loc="outside lower center", ncols=2, handlelength=3)
    return figure


def _curves(axes: Axes, rows: DataFrame, name: str) -> None:
    for estimator in KINDS:
        mine, colour = select(rows, estimator=estimator).sort_values("update"), look(estimator).colour
        axes.plot(mine["update"], mine[name], **look(estimator).plot(markevery=0.25))
        low, high = mine[name] - mine[f"{name}_reach"], mine[name] + mine[f"{name}_reach"]
        axes.fill_between(mine["update"], low, high, color=colour, alpha=0.2, linewidth=0)
    if name == "kl":
        axes.set_ylim(bottom=0)
