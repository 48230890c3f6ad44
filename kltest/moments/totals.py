"""Sums over weighted units, rollouts or batches, from which moments are read."""

from typing import Any

import numpy as np

from kltest.environments import Instance, Paths
from kltest.moments.caller import Called, Caller, joined
from kltest.moments.moments import Expectation, Moments
from kltest.moments.projection import Projection


class Totals:
    """Adds up the gradients and reports of units; `distinct`: no context occurs twice in a unit."""

    def __init__(self, instance: Instance, *, distinct: bool) -> None:
        self._projection = Projection(instance.policy, distinct=distinct)
        self._rollouts, self._of_all = len(instance.paths), instance.of_all
        self._leaves: frozenset[str] = frozenset()
        self._order: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._values: list[np.ndarray | None] = []
        self._metrics: list[np.ndarray | None] = []

    def add(self, paths: Paths, weights: np.ndarray, called: Called, first: int = 0) -> None:
        """Add the called ones of units with probabilities (N,); `first` is the number of units before these."""
        if len(called.index) < len(paths):
            paths, weights = paths.take(called.index), weights[called.index]
        self._projection.add(paths, weights, called.by_leaf)
        self._leaves |= called.by_leaf.keys()
        self._order.append(first + called.index)
        self._weights.append(weights)
        self._values.append(called.value)
        self._metrics.append(called.metric)

    def moments(self, caller: Caller, **others: Any) -> Moments:
        """Return the moments of all units that were added; `others` are further fields."""
        fields = {"reduction": caller.reduction, "dtype": caller.dtype, "coupling": caller.coupling} | others
        return Moments(
            gradient=self._of_all(self._projection.gradient),
            second_moment=self._projection.second_moment,
            rollouts=self._rollouts,
            leaves=self._leaves,
            value=self._expectation(self._values),
            metric=self._expectation(self._metrics),
            **fields,
        )

    def _expectation(self, column: list[np.ndarray | None]) -> Expectation | None:
        if (rows := joined(column)) is None:
            return None
        order = np.argsort(np.concatenate(self._order), kind="stable")
        return Expectation.of(rows[order], np.concatenate(self._weights)[order])
