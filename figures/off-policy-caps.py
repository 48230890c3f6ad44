"""Bias of caps and masks of importance weights, exact, by how far the engine is off and by the length of a rollout."""

from .style import FAINT, INK, Axes, DataFrame, Figure, Look, note, panels, select, tidy

READS = ("off-policy",)
SHOWN = {
    "none": ("no weight", Look(INK, "-", "x")),
    "tis-token": ("tokens, capped", Look("#1f77b4", "-", "o")),
    "mis-token": ("tokens, masked", Look("#1f77b4", ":", "o")),
    "tis-sequence": ("rollouts, capped", Look("#b8860b", "-", "s")),
    "mis-sequence": ("rollouts, masked", Look("#b8860b", ":", "s")),
    "tis-geometric": ("geometric mean, capped", Look("#2a7f4f", "-", "^")),
    "off-policy-sequence-mask": ("failures masked", Look("#8a4fa3", "--", "v")),
    "divergence-mask": ("divergence mask", Look("#c0392b", "--", "D")),
}


def draw(rows: DataFrame) -> Figure:
    """Draw the figure from the rows of its experiment."""
    figure, (by_drift, by_length) = panels(2, 2.9)
    rows = select(rows, "caps")
    drifts, lengths = sorted(rows["off"].unique()), sorted(rows["tokens"].unique())
    near, long = drifts[len(drifts) // 2 - 1], lengths[-1]
    _lines(
        by_drift, rows[rows["tokens"] == long], "off", f"a  Rollouts of {long} tokens", "noise on the engine's logits"
    )
    _lines(by_length, rows[rows["off"] == near], "tokens", f"b  Logits off by {near:g}", "tokens of a rollout")
    by_drift.set(xscale="log")
    by_drift.set_xticks(drifts, [f"{drift:g}" for drift in drifts])
    by_drift.minorticks_off()
    by_length.set_xticks(lengths)
    by_length.set_ylabel("")
    note(by_length, 0.25, 0.06, "rollouts, all of\nthe weight: 0", va="bottom", color=FAINT)
    handles, words = by_drift.get_legend_handles_labels()
    figure.legend(handles, words, ncols=4, loc="outside lower center", handlelength=3)
    return figure


def _lines(axes: Axes, rows: DataFrame, along: str, title: str, words: str) -> None:
    tidy(axes, title=title, x=words, y="‖bias‖ / ‖∇E[R]‖")
    for name, (label, style) in SHOWN.items():
        mean = select(rows, cap=name).groupby(along)["bias"].mean()
        axes.plot(mean.index, mean, label=label, **style.plot())
    axes.set(ylim=(1e-3, 2), yscale="log")
