"""Training curves of naive, partial, last-token and correct gradients: KL, reward and what was asked for, by update."""

from matplotlib.lines import Line2D

from .style import PAGE_WIDTH, Axes, DataFrame, Figure, look, select, tidy

ENVIRONMENTS = {"bandit": "bandit", "sequence": "sequences", "mdp": "MDP"}
WORDS = {
    "none": "no penalty",
    "k1-loss": "naive: $k_1$ in loss",
    "k3-loss": "naive: $k_3$ in loss",
    "last-token": "last token",
    "k1-reward-immediate": "partial: $k_1$ in reward, own token",
    "k1-reward": "correct: $k_1$ in reward, whole rollout",
}
MEASURED = {"kl": "KL(π‖ref), nats", "reward": "E[reward]", "objective": "E[reward] − β·KL(π‖ref)"}


def draw(rows: DataFrame) -> Figure:
    figure = Figure(figsize=(PAGE_WIDTH, 5.4), layout="constrained")
    axes = figure.subplots(len(MEASURED), len(ENVIRONMENTS))
    for column, (environment, title) in enumerate(ENVIRONMENTS.items()):
        # One draw: others lie elsewhere, and the claims speak of all of them.
        here = select(rows, environment=environment, seed=0)
        for row, (name, words) in enumerate(MEASURED.items()):
            tidy(axes[row, column], title=title * (row == 0), y=words * (column == 0), x="updates" * (row == 2))
            _curves(axes[row, column], here, name)
    lines = [Line2D([], [], **look(name).plot(marker="")) for name in WORDS]
    figure.legend(lines, list(WORDS.values()), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _curves(axes: Axes, rows: DataFrame, name: str) -> None:
    for estimator in WORDS:
        mine, colour = select(rows, estimator=estimator).sort_values("update"), look(estimator).colour
        axes.plot(mine["update"], mine[name], **look(estimator).plot(marker=""))
        low, high = mine[name] - mine[f"{name}_reach"], mine[name] + mine[f"{name}_reach"]
        axes.fill_between(mine["update"], low, high, color=colour, alpha=0.2, linewidth=0)
    if name == "kl":
        axes.set_ylim(bottom=0)
