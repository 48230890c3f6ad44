"""Sums over the visits of a stationary policy up to a horizon, by products with sparse matrices.

d_t(c) is the probability of context c at time t, and M(c, c') = Σ_v π(v|c)·P(c'|c, v). The sums below multiply by M
once a step, forward, backward or both, and need (C, V) tables once in all.
"""

from collections.abc import Iterator
from math import isqrt

import numpy as np
from scipy import sparse

from kltest.environments import Environment
from kltest.environments.policies import score_norms, softmax_gradient
from kltest.errors import InvalidEnvironmentError
from kltest.truth.recursions import backwards

# Bytes that the visits between all pairs of contexts may take.
MEMORY = 2**28


class Horizon:
    """Visits of a policy with probabilities `chances` (C, V) in an environment; `visits` (C,) is Σ_t d_t."""

    def __init__(self, environment: Environment, chances: np.ndarray) -> None:
        self.environment = environment
        self.chances = chances
        self._onward = environment.transition
        self._step = self._mixed(chances)
        self._back = self._step.T
        self.visits, self._steps = np.zeros(len(chances)), 0
        for visit in self._forward():
            self.visits += visit
            self._steps += 1

    def following(self, cost: np.ndarray) -> np.ndarray:
        """(C, V) Σ_t d_t(c)·E[Σ_{s>t} cost_s | c, v]: the later costs of a token."""
        mean = (self.chances * cost) @ np.ones(cost.shape[1])
        total = np.zeros(cost.size)
        value = np.zeros(len(mean))
        width = cost.shape[1]
        for visit in self._backward():
            later = self._onward @ value
            value = mean + self._step @ value
            later *= np.repeat(visit, width)
            total += later
        return total.reshape(cost.shape)

    def preceding(self, cost: np.ndarray) -> np.ndarray:
        """(C,) Σ_t E[1{c_t = c}·Σ_{s<t} cost_s]: the costs before a context."""
        paying = self._mixed(self.chances * cost).T
        total = paid = np.zeros(len(self.chances))
        for visit in self._forward():
            total = total + paid
            paid = self._back @ paid + paying @ visit
        return total

    def second_moment(self, moved: np.ndarray, policy: np.ndarray) -> float:
        """E‖Σ_t moved(c_t, v_t)·∇log π(v_t|c_t)‖² with respect to the logits of `policy`, log-probs (C, V).

        Two tokens have an inner product only in a shared context c. The expected gradient of the later one is the mean
        m(c) there, times the number of visits to c after the earlier one. InvalidEnvironmentError if the visits from
        every context to every other do not fit into MEMORY.
        """
        environment, (contexts, vocabulary) = self.environment, policy.shape
        own = float((self.visits[:, None] * self.chances * moved**2 * score_norms(policy)).sum())
        if environment.tree:
            return own
        if contexts**2 * 8 > MEMORY:
            raise InvalidEnvironmentError(
                f"environment {environment.name!r} has {contexts} contexts; the variance by dynamic programming needs "
                f"the visits between all pairs of them, and at most {isqrt(MEMORY // 8)} contexts fit. Use a smaller "
                "environment, or sampling"
            )
        mean = softmax_gradient(self.chances * moved, policy)
        inner = self.chances * moved * (mean - (np.exp(policy) * mean).sum(axis=1, keepdims=True))
        entries = self._onward.tocoo()
        row, following = entries.coords
        revisits = np.zeros((contexts, contexts))
        crossed = 0.0
        for visit in self._backward():
            again = np.bincount(row, entries.data * revisits[following, row // vocabulary], contexts * vocabulary)
            crossed += float(visit @ (inner * again.reshape(inner.shape)).sum(axis=1))
            revisits = self._step @ revisits
            revisits[np.diag_indices(contexts)] += 1
        return own + 2 * crossed

    def _mixed(self, weights: np.ndarray) -> sparse.csr_array:
        """(C, C) Σ_v weights(c, v)·P(·|c, v); duplicate entries of a context are not added up yet."""
        onward = self._onward
        rows = np.repeat(weights.ravel(), np.diff(onward.indptr))
        contexts, vocabulary = weights.shape
        pointers = onward.indptr[::vocabulary].copy()
        return sparse.csr_array((onward.data * rows, onward.indices, pointers), shape=(contexts, contexts))

    def _forward(self) -> Iterator[np.ndarray]:
        """Yield d_0, d_1, … until the horizon, or until every rollout has ended."""
        visit = self.environment.start_distribution()
        for step in range(self.environment.horizon):
            if step:
                visit = self._back @ visit
            if not visit.any():
                return
            yield visit

    def _backward(self) -> Iterator[np.ndarray]:
        """Yield the same, last time step first."""
        return backwards(lambda visit: self._back @ visit, self.environment.start_distribution(), self._steps)
