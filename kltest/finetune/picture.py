"""Runs as a picture: the reward on held-out prompts against KL(π‖ref), evaluation by evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kltest.errors import UsageError
from kltest.finetune.checkpoints import recorded
from kltest.finetune.settings import read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "reward-against-kl.png"
X, Y = "kl", "reward_held_out"


Run = tuple[str, Sequence[Mapping[str, Any]]]
"""A label, and records of metrics."""


def stored(folder: Path) -> Run:
    """Return the KL term and coefficient of the run in a folder, in words, and its records.

    Raises:
        UsageError: There is no run, or a line of it is broken.
    """
    found, settings = recorded(folder), read(folder / "settings.json")
    try:
        return f"{settings['kl']}, β = {settings['beta']:g}", found
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / 'settings.json'} names no KL term and β ({error})") from None


def draw(runs: Sequence[Run], path: Path) -> Path:
    """Write the picture of some runs to a PNG file and return its path; raises like `drawn`."""
    drawn(runs).savefig(path, dpi=150)
    return path


def drawn(runs: Sequence[Run]) -> "Figure":
    """Return a figure of runs, with 95 % intervals at every evaluation; the last one is larger.

    Raises:
        UsageError: A run was never evaluated.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="KL(π‖ref), nats a rollout", ylabel="reward on held-out prompts")
    for label, records in runs:
        there = [record for record in records if X in record and Y in record]
        if not there:
            raise UsageError(f"{label}: the run has no evaluation to draw")
        points = {name: [record[name] for record in there] for name in (X, Y)}
        errors = {
            name: [[abs(record[name] - record[f"{name}_{end}"]) for record in there] for end in ("low", "high")]
            for name in (X, Y)
        }
        lines = axes.errorbar(
            points[X], points[Y], xerr=errors[X], yerr=errors[Y], label=label, marker="o", markersize=3, elinewidth=0.6
        )
        axes.plot(points[X][-1:], points[Y][-1:], marker="o", markersize=7, color=lines[0].get_color())
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
