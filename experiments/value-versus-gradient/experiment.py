"""Pushes two Gaussians through the registered functions: integrated, and sampled."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from kltest.estimators import find
from kltest.loss.placement import place

from ..arrays import generator
from .gaussians import PARTS, Gaussians
from .settings import DIRECTIONS, ESTIMATORS, ORDERS, PLACEMENTS, SIZES
from .settings import SETTINGS as SETTINGS

Row = dict[str, Any]

# The trapezoidal rule on a smooth integrand that dies out at both ends errs by less than rounding at this step. What
# reaches furthest is w²: at a width of 0.8 and KL 1.5 a Gaussian around −10 with a standard deviation of 1.9, at 0.75
# and no shift, where orders are looked for, one around 0 with 2.8. Both ends are ten of those away.
NODES = np.linspace(-30.0, 30.0, 3001)
WEIGHTS = np.exp(-(NODES**2) / 2) / np.sqrt(2 * np.pi) * (NODES[1] - NODES[0])


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every pair of Gaussians that there is, and each direction in which orders are looked for.

    A policy of another width cannot be nearer than its width alone makes it.
    """
    for configuration in configurations:
        if Gaussians(0.0, configuration["width"]).kl <= configuration["kl"]:
            yield {"part": "pair", **configuration}
    yield from ({"part": "orders", "direction": direction} for direction in DIRECTIONS)


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """Of a pair: a row for the value, one a sample size, one a placement and parameter. Of a direction: its orders."""
    if configuration["part"] == "orders":
        return [_order(configuration["direction"], *order) for order in ORDERS]
    return _pair(configuration)


def _pair(configuration: Mapping[str, Any]) -> list[Row]:
    estimator, samples = configuration["estimator"], configuration["samples"]
    about = {name: configuration[name] for name in ("estimator", "kl", "width", "samples", "seed")}
    pair = Gaussians.at(about["kl"], about["width"])
    # All estimators see the same samples.
    shared = {name: about[name] for name in ("kl", "width", "samples", "seed")}
    drawn = generator(shared).standard_normal(samples)

    here, there = evaluate(estimator, pair, NODES), evaluate(estimator, pair, drawn)
    rows = [{"kind": "value", **about, "truth": pair.kl, **_moments(here["value"], there["value"])}]
    mean, variance = _integrated(here["value"])
    for size in SIZES:
        averages = there["value"][: samples // size * size].reshape(-1, size).mean(axis=1)
        squares = (averages - pair.kl) ** 2
        rows.append(
            {
                "kind": "error",
                **about,
                "size": size,
                "error": variance / size + (mean - pair.kl) ** 2,
                "sampled": float(squares.mean()),
                "standard_error": float(squares.std(ddof=1) / np.sqrt(len(squares))),
            }
        )
    for placement in PLACEMENTS:
        for part in PARTS:
            truth = pair.truth[part]
            score_here, score_there = (pair.scores[part](e) for e in (NODES, drawn))
            found = _moments(here[placement] * score_here, there[placement] * score_there)
            rows.append({"kind": "gradient", **about, "placement": placement, "part": part, "truth": truth, **found})
    return rows


def evaluate(estimator: str, pair: Gaussians, e: np.ndarray) -> dict[str, np.ndarray]:
    """The estimator's value at each e, and what it multiplies the score with in each placement."""
    function = find(estimator).function
    x = torch.from_numpy(pair.shift + pair.width * e)[:, None]
    constant = 0.5 * np.log(2 * np.pi)
    ref_logp = -(x**2) / 2 - constant
    log_probability = -(torch.from_numpy(e)[:, None] ** 2) / 2 - constant - np.log(pair.width)
    found = {"value": function(logp=log_probability, ref_logp=ref_logp)[:, 0].numpy()}
    for placement in PLACEMENTS:
        logp = log_probability.clone().requires_grad_()
        value = function(logp=logp, ref_logp=ref_logp)
        objective = place(value, logp, torch.ones_like(logp), placement)
        (gradient,) = torch.autograd.grad(objective.sum(), logp)
        found[placement] = gradient[:, 0].numpy()
    return found


def _integrated(values: np.ndarray) -> tuple[float, float]:
    mean = float(WEIGHTS @ values)
    return mean, float(WEIGHTS @ (values - mean) ** 2)


def _moments(at_nodes: np.ndarray, drawn: np.ndarray) -> Row:
    mean, variance = _integrated(at_nodes)
    return {
        "mean": mean,
        "variance": variance,
        "sampled_mean": float(drawn.mean()),
        "standard_error": float(drawn.std(ddof=1) / np.sqrt(len(drawn))),
    }


def _order(direction: str, one: str, other: str, quantity: str) -> Row:
    """The KL at which the first stops being the better of the two; None where it is so, or is not, all along."""
    assert {one, other} <= set(ESTIMATORS)
    along, ends = path(direction)

    def gap(position: float) -> float:
        pair = along(position)
        return _badness(one, pair, quantity) - _badness(other, pair, quantity)

    row = {"kind": "order", "direction": direction, "one": one, "other": other, "quantity": quantity}
    row |= {"to_kl": along(ends[1]).kl, "better_at_first": bool(gap(ends[0]) < 0)}
    if gap(ends[0]) * gap(ends[1]) > 0:
        return {**row, "kl": None}
    return {**row, "kl": along(brentq(gap, *ends, xtol=1e-14, rtol=1e-14)).kl}


def path(direction: str) -> tuple[Callable[[float], Gaussians], tuple[float, float]]:
    """Gaussians ever further from the reference, and the ends of what is looked at."""
    return {
        "shifted": (lambda shift: Gaussians(shift), (0.2, 1.7)),
        "narrower": (lambda by: Gaussians(0.0, 1 - by), (0.02, 0.25)),
        "wider": (lambda by: Gaussians(0.0, 1 + by), (0.02, 1.0)),
    }[direction]


def _badness(estimator: str, pair: Gaussians, quantity: str) -> float:
    mean, variance = _integrated(evaluate(estimator, pair, NODES)["value"])
    return variance + ((mean - pair.kl) ** 2 if quantity == "error" else 0.0)
