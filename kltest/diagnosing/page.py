"""A diagnosis as one self-contained HTML page, with a picture of the log-ratios."""

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from kltest.diagnosing.answers import FINDING, INCONCLUSIVE, NOTHING, STATUSES
from kltest.diagnosing.logs import Logs
from kltest.diagnosing.questions import CLIP, SAMPLER, TRAINER
from kltest.diagnosing.report import Diagnosis
from kltest.render.html import templates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {FINDING: "refuted", INCONCLUSIVE: "inconclusive", NOTHING: "confirmed"}
POINTS = 4000
"""Most tokens that are drawn as points."""


def page(found: Diagnosis, logs: Logs) -> str:
    """Return the page."""
    file = io.BytesIO()
    if (figure := drawn(logs)) is not None:
        figure.savefig(file, dpi=110)
    picture = base64.b64encode(file.getvalue()).decode("ascii")
    template = templates().get_template("diagnosis.html.j2")
    return template.render(found=found, picture=picture, statuses=STATUSES, colours=COLOURS)


def drawn(logs: Logs) -> "Figure | None":
    """Return a figure with a panel for each pair of columns that the logs have, None without any pair."""
    own, trainer, old = (logs.first(*names.split("|")) for names in (SAMPLER, TRAINER, "old_logp|rollout_logp"))
    wanted: list[tuple[Any, str | None, str | None]] = [
        (_by_position, own, logs.first("ref_logp")),
        (_engine, logs.first("rollout_logp"), trainer),
        (_ratios, logs.first("logp"), old),
        (_weights, logs.first("logp"), old),
    ]
    panels = [(panel, logs.gap(one, other)) for panel, one, other in wanted if one and other and one != other]
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * min(len(panels), 2), 3.2 * -(-len(panels) // 2)), layout="constrained")
    for number, (panel, gap) in enumerate(panels, 1):
        panel(figure.add_subplot(-(-len(panels) // 2), min(len(panels), 2), number), logs, gap, trainer)
    return figure


def _by_position(axes: Any, logs: Logs, gap: np.ndarray, _: str) -> None:
    bins = np.unique(np.linspace(0, gap.shape[1], 40, endpoint=False, dtype=int))
    sums, counts = (np.add.reduceat(one.sum(axis=0), bins) for one in (gap, logs.live))
    axes.plot(bins[counts > 0], sums[counts > 0] / counts[counts > 0], marker=".")
    axes.set(title="Distance from the reference", xlabel="position", ylabel="mean log-ratio, nats a token")


def _engine(axes: Any, logs: Logs, gap: np.ndarray, trainer: str) -> None:
    few = slice(None, None, -(-int(logs.live.sum()) // POINTS))
    axes.plot(logs.columns[trainer][logs.live][few], gap[logs.live][few], ".", markersize=2)
    axes.set(title="Engine less trainer", xlabel="trainer's log-prob of a token", ylabel="log-ratio")


def _ratios(axes: Any, logs: Logs, gap: np.ndarray, _: str) -> None:
    axes.hist(gap[logs.live], bins=60, log=True)
    for end in (-CLIP, CLIP):
        axes.axvline(np.log1p(end), color="0.3", linestyle="--", linewidth=0.8)
    axes.set(title=f"Ratios of tokens; the usual clip 1 ± {CLIP}", xlabel="log-ratio", ylabel="tokens")


def _weights(axes: Any, logs: Logs, gap: np.ndarray, _: str) -> None:
    sums = np.sort(gap.sum(axis=1))[::-1]
    weights, rank = np.exp(sums - sums[0]), np.arange(1, len(sums) + 1) / len(sums)
    axes.plot(rank, weights.cumsum() / weights.sum(), rank, rank)
    axes.set(title="Weights of whole rollouts", xlabel="share of rollouts, heaviest first", ylabel="share of weight")
