"""Exact moments of a loss's gradient in one environment: expectation, variance, and how rows combine."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "per-row", "coupled"]
Together = Literal["any", "same", "none"]


@dataclass(frozen=True)
class Combining:
    """How a loss that couples rows was seen to combine them and batches.

    Attributes:
        ordered: The order of the rows of a batch matters.
        together: Which batches may share a call: of "any" lengths, of the "same" lengths, or "none".
        added_up: Rows are summed, not averaged.
    """

    ordered: bool
    together: Together
    added_up: bool


@dataclass(frozen=True)
class Expectation:
    """Exact mean and standard deviation over rollouts of a number that a loss reports; `rows` (N,) are its values."""

    mean: float
    std: float
    rows: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, weights: np.ndarray) -> "Expectation":
        """Of values (N,) under probabilities (N,)."""
        mean = float(weights @ rows)
        return cls(mean, float(np.sqrt(weights @ (rows - mean) ** 2)), rows)


@dataclass(frozen=True, kw_only=True)
class ExpectedGradient:
    """Expected gradient of a batch with respect to the policy's logits, exact or estimated.

    Attributes:
        gradient: (C, V) E[ĝ].
        reduction: How the loss combines the rows of a batch.
        dtype: The lowest precision in which the loss computes.
        batch: Rollouts in a batch.
        leaves: Fields that the gradient reached; empty if nothing can be learnt from this loss.
        coupling: The observation that showed a coupling of rows, else empty.
    """

    gradient: np.ndarray
    reduction: Reduction
    dtype: str
    batch: int = 1
    leaves: frozenset[str] = frozenset()
    coupling: str = ""


@dataclass(frozen=True, kw_only=True)
class Moments(ExpectedGradient):
    """Exact moments of the gradient ĝ of a batch.

    Attributes:
        second_moment: E‖ĝ‖².
        rollouts: Number of rollouts that were enumerated.
        value: Expectation of what the loss returned per rollout, None if it returned no such number.
        metric: Expectation of the logged KL, None if there is none.
        combining: How a coupled loss was seen to combine the rows of a batch, else None.
    """

    second_moment: float
    rollouts: int
    value: Expectation | None = None
    metric: Expectation | None = None
    combining: Combining | None = None

    @property
    def added_up(self) -> bool:
        """True if a coupled loss was seen to sum over rows instead of averaging."""
        return self.combining is not None and self.combining.added_up

    @property
    def variance(self) -> float:
        """Trace of the covariance of the gradient of one batch; never below zero by rounding."""
        return max(self.second_moment - float((self.gradient**2).sum()), 0.0)
