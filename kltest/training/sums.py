"""Sums and softmax whose bits do not depend on what else is in the tensor.

A sum over an axis that is not the last adds vector by vector, and what is left of the last vector in another order: a
run would end at other bits in another company. Here few terms are added one by one, and many along contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FEW = 16
"""So many planes are added one by one."""


def total(values: Tensor, dim: int) -> Tensor:
    """The sum over one dimension."""
    if values.shape[dim] > FEW:
        return values.movedim(dim, -1).contiguous().sum(dim=-1)
    first, *others = values.unbind(dim)
    for other in others:
        first = first + other
    return first


@dataclass(frozen=True)
class Policy:
    """Softmax tables (V, C, R): `log_probs` and `chances`."""

    log_probs: Tensor
    chances: Tensor


def softmax(logits: Tensor, into: Policy | None = None) -> Policy:
    """Of logits (V, C, R), over tokens; written over a policy that nobody needs any more, if one is given."""
    # NumPy's exp and log take half the time of torch's, and fresh memory as long as all the rest.
    values = logits.numpy()
    policy = into or Policy(torch.empty_like(logits), torch.empty_like(logits))
    shifted, powers = policy.log_probs.numpy(), policy.chances.numpy()
    np.subtract(values, np.maximum.reduce(values), out=shifted)
    np.exp(shifted, out=powers)
    mass = total(policy.chances, 0).numpy()
    shifted -= np.log(mass)
    powers /= mass
    return policy


def softmax_gradient(weights: Tensor, policy: Policy) -> Tensor:
    """(V, C, R) gradient with respect to logits of what has the gradient `weights` at the log-probs."""
    return (policy.chances * total(weights, 0)).neg_().add_(weights)


def by_run(table: Tensor) -> Tensor:
    """(R, C, V) of a (V, C, R) table."""
    return table.permute(2, 1, 0).contiguous()


def by_token(table: Tensor) -> Tensor:
    """(V, C, R) of an (R, C, V) table."""
    return table.permute(2, 1, 0).contiguous()
