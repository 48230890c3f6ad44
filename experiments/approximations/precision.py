"""Half precision: how far the expected gradient is off, by what is rounded, to what, and how near the reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kltest.environments.policies import softmax_gradient, table
from kltest.estimators import find

from ..arrays import generator

Row = dict[str, Any]


def error(one: Mapping[str, Any]) -> list[Row]:
    """One step with V tokens of chances near 1/V: ‖E[ĝ] − E[ĝ] in float64‖/‖E[ĝ] in float64‖.

    "log-probs": they are rounded before they are subtracted, all else is done in float64. "arithmetic": their
    difference is taken in float64 and rounded, and all after it is done in the narrow type.
    """
    kind = getattr(torch, one["kind"])
    drawn = generator(one["vocabulary"], *([one["seed"]] if one["seed"] else []))
    policy = table(0.3 * drawn.standard_normal((1, one["vocabulary"])))
    reference = table(policy + one["log_ratio"] * drawn.standard_normal(policy.shape))
    log_probs, ref_log_probs = torch.from_numpy(policy[0]), torch.from_numpy(reference[0])
    exact = _weight(one["estimator"], log_probs, ref_log_probs)
    if one["rounded"] == "log-probs":
        rounded = (values.to(kind).double() for values in (log_probs, ref_log_probs))
        found = _weight(one["estimator"], *rounded)
    else:
        # The estimators here look at nothing but the difference.
        u = (log_probs - ref_log_probs).to(kind)
        found = _weight(one["estimator"], u, torch.zeros_like(u))
    off, size = (np.linalg.norm(softmax_gradient(np.exp(policy) * values, policy)) for values in (found - exact, exact))
    row = {"relative_error": float(off / size), "predicted_error": None, "misread": None}
    if one["rounded"] == "log-probs":
        square = float((np.exp(2 * policy) * (policy - reference) ** 2).sum())
        variance, misread = _misread(policy, reference, kind)
        row |= {"predicted_error": (variance / square) ** 0.5, "misread": misread}
    return [row]


def _misread(policy: np.ndarray, reference: np.ndarray, kind: Any) -> tuple[float, float]:
    """Σ π²·E[(read − true log-ratio)²], were log-probs to fall anywhere between two neighbours of their grids.

    Two numbers u apart on a grid of step h, f = |u| mod h: rounded, they are |u| − f or |u| − f + h apart, the latter
    with probability f/h. The error has no mean, and the variance f·(h − f). On two different grids the errors are
    independent, of h²/12 each. Also, how many tokens are then expected to be read as something else than 0: of few, no
    average is to be expected.
    """
    step, other = (torch.finfo(kind).eps * 2.0 ** np.floor(np.log2(-values)) for values in (policy, reference))
    u = np.abs(policy - reference)
    left = u % step
    variance = np.where(step == other, left * (step - left), (step**2 + other**2) / 12)
    return float((np.exp(2 * policy) * variance).sum()), float(np.minimum(u / step, 1.0).sum())


def _weight(name: str, log_probs: Any, ref_log_probs: Any) -> np.ndarray:
    """Return the factor of g for each token: the cost if it stands in the reward, the derivative if in the loss."""
    estimator = find(name)
    leaf = log_probs.clone().requires_grad_()
    value = estimator.function(leaf, ref_log_probs)
    if estimator.spec.placement == "reward":
        return value.detach().double().numpy()
    value.sum().backward()
    return leaf.grad.double().numpy()
