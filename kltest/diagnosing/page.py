"""A diagnosis as one self-contained HTML page, with a picture of the log-ratios."""

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kltest.diagnosing.answers import FINDING, INCONCLUSIVE, NOTHING, STATUSES, are_copies
from kltest.diagnosing.logs import Logs
from kltest.diagnosing.questions import CLIP, sampler
from kltest.diagnosing.report import Diagnosis
from kltest.render.html import templates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {FINDING: "refuted", INCONCLUSIVE: "inconclusive", NOTHING: "confirmed"}
POINTS, BINS = 4000, 40
"""Most tokens that are drawn as points, and most bins of positions."""


def page(found: Diagnosis, logs: Logs) -> str:
    """Return the page."""
    figure, picture = drawn(logs), ""
    if figure is not None:
        file = io.BytesIO()
        figure.savefig(file, dpi=110, metadata={"Software": None})
        picture = base64.b64encode(file.getvalue()).decode("ascii")
    template = templates().get_template("diagnosis.html.j2")
    return template.render(found=found, picture=picture, statuses=STATUSES, colours=COLOURS)


def drawn(logs: Logs) -> "Figure | None":
    """Return a figure with a panel for each pair of columns that the logs have, None without any pair."""
    own, old = sampler(logs), logs.first("old_logp", "rollout_logp")
    panels: list[Callable[[Any], None]] = []
    if "ref_logp" in logs.columns and own is not None:
        panels.append(lambda axes: _by_position(axes, logs, str(own)))
    trainer = logs.first("old_logp", "logp")
    if "rollout_logp" in logs.columns and trainer is not None:
        panels.append(lambda axes: _engine(axes, logs, str(trainer)))
    if "logp" in logs.columns and old is not None and not are_copies(logs, "logp", old):
        panels += [lambda axes: _ratios(axes, logs, str(old)), lambda axes: _weights(axes, logs, str(old))]
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * -(-len(panels) // 2)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
    for axes, panel in zip(grid, panels, strict=False):
        panel(axes)
    for axes in list(grid)[len(panels) :]:
        axes.remove()
    return figure


def _by_position(axes: Any, logs: Logs, own: str) -> None:
    width = -(-logs.live.shape[1] // BINS)
    starts = np.arange(0, logs.live.shape[1], width)
    sums = np.add.reduceat(logs.gap(own, "ref_logp").sum(axis=0), starts)
    counts = np.add.reduceat(logs.live.sum(axis=0), starts)
    axes.plot(starts[counts > 0], sums[counts > 0] / counts[counts > 0], marker=".")
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(title="Distance from the reference", xlabel="position", ylabel="mean log-ratio, nats a token")


def _engine(axes: Any, logs: Logs, trainer: str) -> None:
    step = -(-int(logs.live.sum()) // POINTS)
    gap, x = logs.gap("rollout_logp", trainer)[logs.live], logs.columns[trainer][logs.live]
    axes.plot(x[::step], gap[::step], ".", markersize=2)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(title="Engine less trainer", xlabel="trainer's log-prob of a token", ylabel="log-ratio")


def _ratios(axes: Any, logs: Logs, old: str) -> None:
    axes.hist(logs.gap("logp", old)[logs.live], bins=60, log=True)
    for end in (1 - CLIP, 1 + CLIP):
        axes.axvline(np.log(end), color="0.3", linestyle="--", linewidth=0.8)
    axes.set(title=f"Ratios of tokens; the usual clip 1 ± {CLIP}", xlabel="log-ratio", ylabel="tokens")


def _weights(axes: Any, logs: Logs, old: str) -> None:
    log_weights = np.sort(logs.gap("logp", old).sum(axis=1))[::-1]
    shares = np.exp(log_weights - log_weights[0])
    axes.plot(np.arange(1, len(shares) + 1) / len(shares), shares.cumsum() / shares.sum())
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    axes.set(
        title="Weights of whole rollouts", xlabel="share of rollouts, heaviest first", ylabel="share of the weight"
    )
