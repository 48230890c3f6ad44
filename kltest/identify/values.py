"""Logged values, compared with the numbers that are called "the KL".

Three numbers are called "the KL" in logs: E[Σu], E[Σu]/E[L] and E[Σu/L]. What a loss reports for a rollout is compared
with each in expectation. A mean over tokens divides by a length that depends on the tokens drawn, so that a per-token
estimate without bias (k3) has one after the division; multiplied by the length again it has none, and by that it is
known. The token-mean of a batch is then judged by what it tends to, E[Σu]/E[L]; a mean of token-means keeps its bias.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.case import Case
from kltest.identify.rows import Reported
from kltest.loss.outcome import Outcome
from kltest.moments import Moments
from kltest.moments.tolerances import TOLERANCES
from kltest.report import ValueRow
from kltest.rollout import Rollout
from kltest.truth import value

NAMES = ("kl", "kl_per_token", "mean_of_token_means")
# Logged numbers are compared as in float64 if only they, and not the loss, tell the precision.
TOLERANCE = TOLERANCES["float64"].value


def true_values(instance: Instance) -> dict[str, float]:
    """Return the three numbers that are called "the KL" in logs, under the policy."""
    return {name: value(name, instance) for name in NAMES}


def reported(case: Case, found: Sequence[Moments], dtype: str, call: Callable[[Rollout], Outcome]) -> Reported | None:
    """Compare the logged KL, or else what is returned for a rollout, with each number that it may be.

    Args:
        case: The environment and sampler.
        found: Moments of the loss, one an instance.
        dtype: The precision in which the loss computes.
        call: Calls the loss once.

    Returns:
        The comparison, or None if the loss neither logs a KL nor returns a number a rollout.
    """
    metrics = [moments.metric for moments in found]
    is_metric = None not in metrics
    answers = metrics if is_metric else [moments.value for moments in found]
    known = [answer for answer in answers if answer is not None]
    if len(known) < len(answers):
        return None
    instances, limit = case.instances, TOLERANCES[dtype].value
    truths = [true_values(instance) for instance in instances]
    means = [answer.mean for answer in known]
    matches, judged, padded = first_match(means, truths, limit), True, instances[0].paths.padded
    if matches is None and padded and found[0].batch == 1:
        lengths = [instance.paths.lengths for instance in instances]
        chances = [instance.rollout_weights(case.sampler) for instance in instances]
        summed = [float(p @ (k.rows * n)) for p, k, n in zip(chances, known, lengths, strict=True)]
        if first_match(summed, [{"kl": truth["kl"]} for truth in truths], limit):
            matches = "kl_per_token"
            if _weights_tokens_alike(call, instances[0]):
                means = [total / float(p @ n) for total, p, n in zip(summed, chances, lengths, strict=True)]
    elif matches is None and padded:
        # Of a token-mean over several rollouts the lengths of all of them would have to be known.
        judged = False
    name = matches or _nearest(means, truths)
    row = ValueRow(
        case.environment,
        case.sampler,
        matches,
        max(abs(mean / truth[name] - 1) for mean, truth in zip(means, truths, strict=True)),
        max(answer.std / abs(truth[name]) for answer, truth in zip(known, truths, strict=True)),
    )
    return Reported(row, is_metric, tuple(means), tuple(truths), judged)


def first_match(means: Sequence[float], truths: Sequence[dict[str, float]], limit: float) -> str | None:
    """Return the first name whose number each mean is, instance by instance, up to a relative `limit`."""
    pairs = list(zip(means, truths, strict=True))
    return next((n for n in truths[0] if all(abs(mean - t[n]) <= limit * abs(t[n]) for mean, t in pairs)), None)


def _nearest(means: Sequence[float], truths: Sequence[dict[str, float]]) -> str:
    pairs = list(zip(means, truths, strict=True))
    return min(truths[0], key=lambda name: max(abs(mean / truth[name] - 1) for mean, truth in pairs))


def _weights_tokens_alike(call: Callable[[Rollout], Outcome], instance: Instance) -> bool:
    """Return True if the metric of two rollouts is the mean over their tokens, not over the rollouts."""
    lengths = instance.paths.lengths
    pair = [int(lengths.argmin()), int(lengths.argmax())]
    every = Rollout.of(instance)
    try:
        called = [call(every.take(rows)).metric for rows in (pair[:1], pair[1:], pair)]
    except KltestError:
        return False
    if any(metric is None or metric.numel() != 1 for metric in called):
        return False
    short, long, both = (float(metric.sum()) for metric in called if metric is not None)
    mean = (short * lengths[pair[0]] + long * lengths[pair[1]]) / lengths[pair].sum()
    return bool(np.isclose(both, mean, rtol=TOLERANCE) and not np.isclose(both, (short + long) / 2))
