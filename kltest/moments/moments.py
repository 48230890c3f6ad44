"""Exact moments of a loss's gradient in one environment: expectation, variance, and how rows combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "per-row", "coupled"]


@dataclass(frozen=True)
class Expectation:
    """Exact mean and standard deviation over rollouts of a number that a loss reports; `rows` (N,) are its values."""

    mean: float
    std: float
    rows: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, weights: np.ndarray) -> Expectation:
        """Of values (N,) under probabilities (N,)."""
        mean = float(weights @ rows)
        return cls(mean, float(np.sqrt(weights @ (rows - mean) ** 2)), rows)


@dataclass(frozen=True)
class Moments:
    """Exact moments of the gradient ĝ of a batch with respect to the policy's logits.

    `gradient` (C, V) = E[ĝ]; `second_moment` = E‖ĝ‖²; `variance` = E‖ĝ‖² − ‖E[ĝ]‖², the trace of the covariance. A
    batch is `batch` rollouts: one, unless the loss was graded over larger ones. `rollouts` is how many were enumerated.
    `leaves` names the fields that the gradient reached (empty: nothing can be learnt from this loss).
    `value` and `metric` are the expectations of what the loss returned per rollout and of its logged KL, where it has
    them. `coupling` says what gave a coupled loss away. `added_up`: a coupled loss was seen to sum over rows
    instead of averaging.
    """

    gradient: np.ndarray
    second_moment: float
    rollouts: int
    reduction: Reduction
    dtype: str
    method: Literal["exact", "dynamic"] = "exact"
    batch: int = 1
    leaves: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    value: Expectation | None = None
    metric: Expectation | None = None
    coupling: str = ""
    added_up: bool = False

    @property
    def variance(self) -> float:
        """Trace of the covariance of the gradient of one batch; never below zero by rounding."""
        return max(self.second_moment - float((self.gradient**2).sum()), 0.0)
