"""The KL that a loss logs: calls that return it, and rows in which it is known.

A metric may be any of the three numbers that are called the KL (SYMBOLS).
"""

from contextlib import suppress

import numpy as np

from kltest.checks.batches import evenly
from kltest.environments import Instance
from kltest.errors import KltestError, TargetError
from kltest.identify.findings import Findings, Row, shared
from kltest.identify.instances import instances
from kltest.identify.values import Reported
from kltest.rollout import Rollout

# Rollouts of one call: as many as in a usual group, so that losses that need groups can be called.
BATCH = 4
ALL = list(range(BATCH))
# Relative change of a metric that counts; room for another order of adding up.
MOVED = 1e-6
# Reason to skip checks that read a metric from one call.
OF_EARLIER_CALLS = "the KL that the loss logs depends on earlier calls and cannot be read from one"
# Calls of one batch after which what is logged has settled, unless it is seen from a few where it goes.
FEW, MANY = 5, 1000
SYMBOLS = {"kl": "E[Σu]", "kl_per_token": "E[Σu]/E[L]", "mean_of_token_means": "E[Σu/L]"}


@shared
def no_kl(findings: Findings) -> str:
    """Return a reason if the loss logs no KL, or one that depends on earlier calls; else nothing."""
    for environment in findings.environments:
        base = batch(instances(environment, findings.seed)[0], findings.seed)
        try:
            first, _, again = (findings.loss.returned(base.take(rows)).metric for rows in (ALL, ALL[:-1], ALL))
        except KltestError:  # reported with the gradient
            continue
        if first is None or again is None:
            return "the loss logs no KL"
        if moved(first.numpy(), again.numpy()):
            return OF_EARLIER_CALLS
        return ""
    return "the loss logs no KL"


def batch(instance: Instance, padding: int, sampler: str = "current") -> Rollout:
    """A few rollouts of an instance, the shortest and the longest among them."""
    rows = evenly(instance.paths.by_length, BATCH)
    return Rollout.of(instance, sampler=sampler, padding=padding).take(rows)


def logged(findings: Findings, sampler: str = "current") -> list[tuple[Row, Reported]]:
    """The last row of each graded environment in which a metric is known, and the metric."""
    found = []
    for environment in findings.environments:
        with suppress(KltestError):
            rows = findings.measure.rows(environment, sampler)
            found += [(row, row.reported) for row in rows if row.reported is not None and row.reported.is_metric][-1:]
    return found


def metric_of(findings: Findings, rollout: Rollout, beta: float | None = None) -> np.ndarray:
    """The metric of a batch, per token at live positions only; TargetError if there is none."""
    metric = findings.loss.returned(rollout.replace(), beta).metric
    if metric is None:
        raise TargetError(f"{findings.loss.name} logs a KL in some calls and none in others")
    return np.where(rollout.peek("mask").numpy() != 0, metric.numpy(), 0.0) if metric.dim() == 2 else metric.numpy()


def settled(findings: Findings, rollout: Rollout) -> float | None:
    """Return what is logged of a batch if it is called again and again, from the first call of all on.

    A moving average comes to the batch's own number, m + d·r/(1 − r) after steps d that become r times as large. None
    if it moves on and on, as a sum that is never reset.
    """
    calls, seen = findings.loss.calls, list[float]()
    before = calls.kept()
    calls.state.reset()
    try:
        with calls.holding():
            for count in range(MANY):
                seen.append(as_one(metric_of(findings, rollout)))
                if count < FEW - 1:
                    continue
                steps = np.diff(seen[-FEW:])
                if np.abs(steps).max() <= MOVED * abs(seen[-1]):
                    return seen[-1]
                shares = steps[1:] / np.where(steps[:-1] == 0, np.nan, steps[:-1])
                share = float(shares[-1])
                if abs(share) < 1 - MOVED and np.ptp(shares) <= MOVED:
                    return seen[-1] + float(steps[-1]) * share / (1 - share)
    finally:
        before.reset()
    return None


def as_one(metric: np.ndarray) -> float:
    """Return the metric of some rollouts as one number: the mean of their sums."""
    return float((metric.sum(axis=1) if metric.ndim == 2 else metric).mean())


def moved(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two metrics differ by more than rounding; NaN and infinity differ unless they are the same."""
    size = float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    return one.shape != other.shape or not np.allclose(one, other, rtol=0, atol=MOVED * size, equal_nan=True)


def number(metric: np.ndarray) -> str:
    """A metric of several rollouts as one number, as a log would show it."""
    rows = metric.sum(axis=1) if metric.ndim == 2 else metric
    return f"{float(rows.mean()):.4g}"
