"""Sums and softmax whose bits do not depend on what else is in the tensor.

NumPy adds planes one by one, but what lies along contiguous memory in another order, and the same axis is now the one,
now the other: a run would end at other bits in another company. Here few terms are always added one by one, and many
along contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FEW = 16
"""So many planes are added one by one."""


def total(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The sum over one axis."""
    if values.shape[axis] > FEW:
        return np.add.reduce(np.ascontiguousarray(np.moveaxis(values, axis, -1)), axis=-1)
    values = np.ascontiguousarray(values)
    if values[0].size > 1 and values.shape[-1] > 1:
        return np.add.reduce(values, axis=axis)
    return np.add.accumulate(values, axis=axis).take(-1, axis=axis)


@dataclass(frozen=True)
class Policy:
    """Softmax tables (V, C, R): `log_probs` and `chances`."""

    log_probs: np.ndarray
    chances: np.ndarray


def softmax(logits: np.ndarray, into: Policy | None = None) -> Policy:
    """Of logits (V, C, R), over tokens; written over a policy that nobody needs any more, if one is given."""
    policy = into or Policy(np.empty_like(logits), np.empty_like(logits))
    shifted, powers = policy.log_probs, policy.chances
    np.subtract(logits, np.maximum.reduce(logits), out=shifted)
    np.exp(shifted, out=powers)
    mass = total(powers)
    shifted -= np.log(mass)
    powers /= mass
    return policy


def softmax_gradient(weights: np.ndarray, policy: Policy) -> np.ndarray:
    """(V, C, R) gradient with respect to logits of what has the gradient `weights` at the log-probs."""
    gradient = policy.chances * total(weights)
    return np.subtract(weights, gradient, out=gradient)


def by_run(table: np.ndarray) -> np.ndarray:
    """(R, C, V) of a (V, C, R) table."""
    return np.ascontiguousarray(table.transpose(2, 1, 0))


def by_token(table: np.ndarray) -> np.ndarray:
    """(V, C, R) of an (R, C, V) table."""
    return np.ascontiguousarray(table.transpose(2, 1, 0))
