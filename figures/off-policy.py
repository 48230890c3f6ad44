"""Costs of staleness: drift of the gradient, effective samples, noise, stability and where training ends."""

import numpy as np

from .style import FAINT, INK, Axes, DataFrame, Figure, Look, label, look, name_ends, note, panels, select, tidy

# Estimators, and what their ratios are called here.
DRIFT = {
    "k1-reward": "no ratio",
    "k1-reward-stale": "stale rewards",
    "k3-broadcast-ratio": "broadcast ratio",
    "k1-reward-clipped-ratio": "clipped ratio",
    "k3-ratio": "token's ratio",
}
PRICE = {
    "none": ("no ratio", look("k1-reward")),
    "token": ("token’s", look("k3-ratio")),
    "prefix": ("prefix", look("k2-prefix-ratio")),
    "sequence": ("sequence’s", look("k1-reward-sequence-ratio")),
}
CLIPPED = Look("#b8860b", ":", "v")
# Ways to train, by the look of their KL term; what shares one is told apart by its line.
RECIPES = {
    "stale": ("stale rewards", look("k1-reward-stale")),
    "none": ("no ratio, no baseline", Look(INK, "-", "x")),
    "token-clipped": ("clipped", CLIPPED),
    "token-detached": ("token, detached", look("k3-ratio-detached")),
    "token": ("token", look("k3-ratio")),
    "sequence": ("sequence", look("k1-reward-sequence-ratio")),
    "prefix-to-go": ("prefix, to go", look("k1-reward-to-go-prefix-ratio")),
    "none-centred": ("no ratio, baseline", look("leave-one-out")),
}
LOOKS = {"k1-reward-clipped-ratio": CLIPPED}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (drift, shares, price, cycle, exact, drawn) = panels(6, 5.2)
    _drift(drift, select(rows, "path"))
    _shares(shares, select(rows, "weights"))
    _price(price, select(rows, "step"))
    # The environment whose optimum is farthest from the reference: staleness has most to spoil there.
    stability = select(rows, "stability")
    environment = stability.loc[stability["kl"].idxmax(), "seed"]
    _cycle(cycle, select(stability, seed=environment))
    trained = select(rows, "training", seed=environment)
    _ends(exact, select(trained, batch_size=0), "Where exact training ends", "e")
    size = trained["batch_size"].max()
    _ends(drawn, select(trained, batch_size=size), f"With {size} rollouts", "f")
    drawn.sharey(exact)
    drawn.set_ylabel("")
    handles, words = exact.get_legend_handles_labels()
    figure.legend(handles, words, ncols=4, loc="outside lower center", handlelength=3)
    return figure


def _means(rows: DataFrame, along: str, column: str) -> tuple[np.ndarray, np.ndarray]:
    found = rows.groupby(along)[column].mean()
    return found.index.to_numpy(), found.to_numpy()


def _updates(axes: Axes, ticks: list[float], label: str) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _drift(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="a  What staleness adds", y="change of gradient / ‖∇KL‖")
    rows = rows[(rows["length"] == rows["length"].max()) & (rows["staleness"] > 0)]
    ends = []
    for name, words in DRIFT.items():
        x, y = _means(select(rows, estimator=name), "staleness", "drift")
        style = LOOKS.get(name, look(name))
        axes.plot(x, y, **style.plot())
        ends += [(words, (x[-1], y[-1]), style.colour)] if len(x) else []
    ticks = sorted(rows["staleness"].unique())
    _updates(axes, ticks, "updates that the sampler is behind")
    axes.set_xlim(0.85, max(ticks) * 7)
    name_ends(axes, ends)
    words = "prefix and sequence ratios:\nnone, at any staleness"
    note(axes, 0.97, 0.03, words, ha="right", va="bottom", color=look("k1-reward-sequence-ratio").colour)


def _shares(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="b  Rollouts that count, by weights", x="tokens of a rollout", y="effective share of rollouts")
    noises = sorted(rows["noise"].unique())
    mine = select(rows, noise=noises[len(noises) // 2 - 1])
    for column, name, words, offset in (
        ("token_share", "k3-ratio", "token's", (-34, -8)),
        ("prefix_share", "k2-prefix-ratio", "prefix's", (6, 6)),
        ("log_sequence_share", "k1-reward-sequence-ratio", "sequence's", (-56, -3)),
    ):
        x, y = _means(mine, "at", column)
        y = np.exp(y) if column.startswith("log") else y
        axes.plot(x, y, **look(name).plot(markersize=2.6))
        if len(x):
            at = np.abs(y - 0.5).argmin()
            label(axes, words, (x[at], y[at]), offset, look(name).colour, va="center")
    axes.set(xscale="log", ylim=(-0.18, 1.08))
    longest = mine["at"].max()
    each = (select(mine, at=longest)["kl_to_sampler"] / longest).mean()
    note(axes, 0.03, 0.05, f"KL(π‖μ) = {each:.4f} nats a token", color=INK)


def _price(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="c  The price in noise", x="KL(π‖μ) of a rollout, nats", y="noise / on-policy")
    # Of trained policies, over that of the same ones on rollouts of their own.
    where = ["family", "tokens", "start", "beta", "seed", "made"]
    own = select(rows, drift="none").set_index(where)["noise"].rename("own")
    trained = select(rows, drift=("age", "engine"), tokens=rows["tokens"].max(), made=lambda one: one > 0)
    joined = trained.join(own, on=where)
    for way, (words, style) in PRICE.items():
        noise = joined[f"noise_{way}"].astype(float).fillna(np.inf) / joined["own"].astype(float)
        middle = noise.groupby(joined["nats"]).median()
        axes.plot(middle.index, middle, label=words, **style.plot())
    axes.axhline(1, color=FAINT, linewidth=0.6, linestyle=":")
    axes.set(xscale="log", yscale="log", ylim=(0.3, 1e7))
    axes.legend(loc="upper left")


def _cycle(axes: Axes, rows: DataFrame) -> None:
    tidy(axes, title="d  Does a cycle settle?", y="factor on a small step")
    for name, (words, style) in RECIPES.items():
        if name in ("token-clipped", "token-detached", "prefix-to-go", "token"):
            continue
        mine = select(rows, recipe=name).sort_values("updates")
        x, y = _means(mine, "updates", "multiplier")
        axes.plot(x, y, **style.plot(linestyle="none"))
        axes.plot(x, mine["predicted"], color=style.colour, linewidth=0.9)
        if len(x) and name in ("stale", "none"):
            label(axes, words.replace(", ", ",\n"), (x[-1], y[-1]), (4, 0), style.colour, va="center")
    axes.axhline(1, color=INK, linewidth=0.6, linestyle=":")
    _updates(axes, [1, 4, 16, 64], "updates to one sampler")
    axes.set(xlim=(0.85, 400), ylim=(0.3, 900))
    words, colour = "sequence's ratio; no ratio, baseline", look("k1-reward-sequence-ratio").colour
    label(axes, words, (1, 0.78), (0, -5), colour, va="center")


def _ends(axes: Axes, rows: DataFrame, title: str, letter: str) -> None:
    tidy(axes, title=f"{letter}  {title}", y="J* − J at the end, nats")
    for name, (words, style) in RECIPES.items():
        mine = select(rows, recipe=name).sort_values("inner_steps")
        axes.plot(mine["inner_steps"], mine["gap"], label=words, **style.plot())
        if mine["batch_size"].any():
            axes.fill_between(
                mine["inner_steps"], mine["low"], mine["high"], color=style.colour, alpha=0.12, linewidth=0
            )
    _updates(axes, sorted(rows["inner_steps"].unique()), "updates to one sampler")
