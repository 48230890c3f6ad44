"""Sums and softmax of a run that do not depend, to the last bit, on the other runs in the tensor.

NumPy's order of addition depends on the memory layout: planes are added one by one, contiguous memory pairwise. The
number of runs changes the layout, and with it the rounding of every run. Here up to `FEW` terms are always added one
by one, and more always along contiguous memory.
"""

from dataclasses import dataclass

import numpy as np

FEW = 16
"""Largest number of terms that are added one by one."""


def total(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Sum over one axis."""
    if values.shape[axis] > FEW:
        return np.add.reduce(np.ascontiguousarray(np.moveaxis(values, axis, -1)), axis=-1)
    values = np.ascontiguousarray(values)
    if values[0].size > 1 and values.shape[-1] > 1:
        return np.add.reduce(values, axis=axis)
    # One run, or one number a plane: NumPy would add these pairwise, so that they are accumulated instead.
    return np.add.accumulate(values, axis=axis).take(-1, axis=axis)


@dataclass(frozen=True)
class Policy:
    """Softmax tables (V, C, R): log-probs, and probabilities as `chances`."""

    log_probs: np.ndarray
    chances: np.ndarray


def softmax(logits: np.ndarray, into: Policy | None = None) -> Policy:
    """Return the policy of logits (V, C, R); `into` is a policy that is no longer needed, whose memory is reused."""
    policy = into or Policy(np.empty_like(logits), np.empty_like(logits))
    shifted, powers = policy.log_probs, policy.chances
    np.subtract(logits, np.maximum.reduce(logits), out=shifted)
    np.exp(shifted, out=powers)
    mass = total(powers)
    shifted -= np.log(mass)
    powers /= mass
    return policy


def softmax_gradient(weights: np.ndarray, policy: Policy) -> np.ndarray:
    """Gradient (V, C, R) at the logits of a function whose gradient at the log-probs is `weights`."""
    gradient = policy.chances * total(weights)
    return np.subtract(weights, gradient, out=gradient)


def transposed(table: np.ndarray) -> np.ndarray:
    """Return a (V, C, R) table as (R, C, V), or the other way round."""
    return np.ascontiguousarray(table.transpose(2, 1, 0))
