"""Bias and variance of nine gradients by length, exact and sampled; where orders change; random pairs."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import brentq

from kltest.errors import InvalidEnvironmentError
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import dynamic, exact
from kltest.truth import gradient, value

from ..arrays import generator
from ..rollouts import gradients
from .pairs import at_distance, types, types_of
from .settings import (
    BRACKET,
    ENUMERATED,
    ESTIMATORS,
    EXACT,
    PLACEMENTS,
    PUBLISHED,
    RANDOM_LENGTH,
    SAMPLED,
    SHORTEST,
    UNBIASED,
)
from .settings import SETTINGS as SETTINGS

Row = dict[str, Any]
SAMPLES = ("sampled_bias", "sampled_bias_error", "sampled_std", "sampled_std_error", "z_mean", "z_std")
NINE = tuple((estimator, placement) for estimator in ESTIMATORS for placement in PLACEMENTS)


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """A row an estimator and placement, or a distance, or a random pair; each names its part."""
    compute_part = {"length": _length, "order": _order, "random": _random}[configuration["part"]]
    return [{**configuration, **row} for row in compute_part(configuration)]


def _length(one: Mapping[str, Any]) -> list[Row]:
    instance = at_distance(one["length"], one["kl"], one["hold"])
    paths, truth = types(one["length"]), gradient("reverse_kl", instance).ravel()
    weights = np.exp(paths.log_probability(instance.policy))
    size = np.linalg.norm(truth)
    sampled = one["hold"] == SAMPLED and (one["length"] - SHORTEST) % one["every"] == 0
    sample = _draw(instance, one) if sampled else None
    rows = []
    for estimator, placement in NINE:
        mean, covariance = _moments(gradients(estimator, instance, paths, placement, "return"), weights)
        variance = float(np.trace(covariance))
        row = {
            "estimator": estimator,
            "placement": placement,
            "rollout_kl": value("kl", instance),
            "types": len(paths),
            "bias": float(np.linalg.norm(mean - truth) / size),
            "std": float(np.sqrt(variance) / size),
            "off_again": _again(estimator, placement, instance, mean, variance, size),
            **dict.fromkeys(SAMPLES),
        }
        if sample is not None:
            drawn, like, batch = sample
            each = gradients(estimator, instance, drawn, placement, "return")
            row |= _sampled(each, like, batch, mean, covariance, truth)
        rows.append(row)
    return rows


def _moments(each: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = weights @ each
    centred = each - mean
    return mean, (centred * weights[:, None]).T @ centred


def _again(
    estimator: str, placement: str, instance: Any, mean: np.ndarray, variance: float, size: float
) -> float | None:
    """Relative difference of a second route from the truth: enumeration of all sequences, else dynamic programming.

    Dynamic programming gives the mean of all nine, and the variance of those in the loss.
    """
    loss = resolve(estimator, Call(placement, "return"))
    if instance.environment.horizon <= ENUMERATED:
        found = exact(loss, instance)
        again: float | None = found.variance
    else:
        expected = dynamic(loss, instance, variance=placement == "loss")
        found, again = expected, expected.variance
    off = np.linalg.norm(found.gradient.ravel() - mean) / size
    return float(off if again is None else max(off, abs(again - variance) / size**2))


def _draw(instance: Any, one: Mapping[str, Any]) -> tuple[Any, np.ndarray, np.ndarray]:
    """Rollouts drawn token by token: one of each type that occurs, which each is like, and the batch that it is in."""
    own = {name: one[name] for name in ("length", "kl", "hold", "batches", "samples", "seed")}
    paths = instance.environment.sample(instance.policy, one["batches"] * one["samples"], generator(own))
    found, like = types_of(paths)
    return found, like, np.repeat(np.arange(one["batches"]), one["samples"])


def _sampled(
    each: np.ndarray, like: np.ndarray, batch: np.ndarray, mean: np.ndarray, covariance: np.ndarray, truth: np.ndarray
) -> Row:
    """Bias and spread of one rollout's gradient from the mean gradients of batches, beside the exact ones.

    `z_mean` is the largest deviation of a component of the overall mean in exact standard errors, `z_std` that of the
    spread between batches in its own standard error.
    """
    batches, rollouts, size = int(batch[-1]) + 1, len(batch), np.linalg.norm(truth)
    counts = np.zeros((batches, len(each)))
    np.add.at(counts, (batch, like), 1.0)
    means = counts @ each / (rollouts / batches)
    overall = means.mean(axis=0)
    squares = ((means - mean) ** 2).sum(axis=1) * (rollouts / batches)
    variance, variance_error = squares.mean(), squares.std(ddof=1) / np.sqrt(batches)
    exact = np.trace(covariance)
    # A component that never changes has no error, and must be right to rounding.
    errors = np.maximum(np.sqrt(np.diag(covariance) / rollouts), EXACT * size)
    found = (
        np.linalg.norm(overall - truth) / size,
        np.sqrt(exact / rollouts) / size,
        np.sqrt(variance) / size,
        variance_error / (2 * np.sqrt(exact)) / size,
        (np.abs(overall - mean) / errors).max(),
        (variance - exact) / variance_error,
    )
    return {name: float(number) for name, number in zip(SAMPLES, found, strict=True)}


def _order(one: Mapping[str, Any]) -> list[Row]:
    """The distance at which k1 in the loss becomes the less noisy of two, compared with k1 in the reward."""

    def gap(kl: float) -> float:
        instance = at_distance(one["length"], kl)
        return _spread(instance, "k1-loss", "loss") - _spread(instance, "k1-loss", "reward")

    equal = float(brentq(gap, *BRACKET, xtol=1e-12)) if gap(BRACKET[0]) > 0 > gap(BRACKET[1]) else None
    return [{"equal_at": equal}]


def _spread(instance: Any, estimator: str, placement: Any) -> float:
    """Trace of the covariance."""
    paths = types(instance.environment.horizon)
    weights = np.exp(paths.log_probability(instance.policy))
    return float(np.trace(_moments(gradients(estimator, instance, paths, placement, "return"), weights)[1]))


def _random(one: Mapping[str, Any]) -> list[Row]:
    """For how many random pairs the published orders hold; directions that never lead so far away are drawn again."""
    drawn = generator("random", one["kl"], one["seed"])
    paths = types(RANDOM_LENGTH)
    counts: Counter[str] = Counter()
    worst = 0.0
    pairs = 0
    while pairs < one["pairs"]:
        reference, direction = drawn.standard_normal((2, 3, 2))
        try:
            instance = at_distance(RANDOM_LENGTH, one["kl"], "kl", reference, direction)
        except InvalidEnvironmentError:
            continue
        pairs += 1
        weights = np.exp(paths.log_probability(instance.policy))
        truth = gradient("reverse_kl", instance).ravel()
        bias, noise = {}, {}
        for which in NINE:
            mean, covariance = _moments(gradients(which[0], instance, paths, which[1], "return"), weights)
            bias[which], noise[which] = np.linalg.norm(mean - truth), np.trace(covariance)
        most, noisiest = (max(PUBLISHED, key=of.__getitem__) for of in (bias, noise))
        counts["most_biased_is_k3_reward"] += most == ("k3-loss", "reward")
        counts["most_biased_is_k1_loss"] += most == ("k1-loss", "loss")
        counts["k1_loss_noisiest"] += noisiest == ("k1-loss", "loss")
        counts["k1_loss_less_noisy_than_k1_reward"] += noise["k1-loss", "loss"] < noise["k1-loss", "reward"]
        counts["k3_both_less_noisy_than_k1_reward"] += noise["k3-loss", "both"] < noise["k1-loss", "reward"]
        worst = max(worst, *(bias[which] / np.linalg.norm(truth) for which in UNBIASED))
    return [{name: int(count) for name, count in counts.items()} | {"bias_of_unbiased": float(worst)}]
