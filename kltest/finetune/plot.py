"""A picture of a finished run: reward, KL, length and gradient over the steps."""

from collections.abc import Sequence
from pathlib import Path

from kltest.files import write
from kltest.finetune.checkpoints import Record

PANELS = {
    "reward": ("reward", "reward_held_out", "gold_held_out"),
    "KL(π‖ref), nats a rollout": ("kl", "kl_logged"),
    "tokens a rollout": ("length", "length_held_out"),
    "norm of the gradient": ("gradient_norm",),
}


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw the metrics of a run into an SVG file; bands are 95 % intervals."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name in names:
            there = [record for record in records if name in record]
            if not there:
                continue
            steps, values = ([record[key] for record in there] for key in ("step", name))
            axes.plot(steps, values, label=name, marker="." if len(there) < 20 else None)
            if f"{name}_low" in there[0]:
                ends = ([record[f"{name}_{end}"] for record in there] for end in ("low", "high"))
                axes.fill_between(steps, *ends, alpha=0.2)
        axes.set(title=title, xlabel="step")
        if axes.lines:
            axes.legend()
    with matplotlib.rc_context({"svg.hashsalt": "kltest"}):
        write(path, lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))
