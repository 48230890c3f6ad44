"""From gradients at the log-probs of tokens to gradients with respect to the policy's logits.

With A_t the gradient of a rollout at its token t's next-token log-probs (the sampled one's share included), the
gradient with respect to the logits of context c is Σ_{t: c_t = c} (A_t − π(c)·ΣA_t). The map is linear for each
context, so an expectation is taken of A first and projected once. A squared norm needs each rollout's own sum over the
tokens that share a context; where no two do, it is a sum over tokens as well:

    ‖a·e_y − a·π(c)‖² = a²·(1 − 2π(y|c) + ‖π(c)‖²).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kltest.environments import Paths
from kltest.policies import score_norms, softmax_gradient


class Projection:
    """Adds up weighted rollouts: `table` (C, V) = E[A], and `second_moment` = E‖ĝ‖².

    `distinct` says that no context occurs twice in a rollout.
    """

    def __init__(self, policy: np.ndarray, *, distinct: bool) -> None:
        self.policy = policy
        self.distinct = distinct
        self.table = np.zeros(policy.shape)
        self._others = 0.0
        self._squares = np.zeros(policy.shape)

    @property
    def gradient(self) -> np.ndarray:
        """(C, V) expected gradient with respect to logits."""
        return softmax_gradient(self.table, self.policy)

    @property
    def second_moment(self) -> float:
        """E‖ĝ‖²."""
        sampled = float((self._squares * score_norms(self.policy)).sum()) if self._squares.any() else 0.0
        return self._others + sampled

    @cached_property
    def _probability(self) -> np.ndarray:
        return np.exp(self.policy)

    def add(self, paths: Paths, weights: np.ndarray, logp: np.ndarray | None, logits: np.ndarray | None) -> None:
        """Rollouts of probability `weights` (N,) and their gradients (N, T) and (N, T, V), zero where padded."""
        if logits is not None:
            if logp is not None:
                logits = logits.copy()
                logits[np.arange(len(paths))[:, None], np.arange(paths.shape[1]), paths.tokens] += logp
                logp = None
            paths.collect(logits * weights[:, None, None], self.table)
            if self.distinct:
                self._others += float(weights @ self._squared_norms(paths, logits).sum(axis=1))
        elif logp is not None:
            # Transposed, so that each token's column is contiguous for the sums over prefixes.
            columns = np.ascontiguousarray(logp.T)
            weighted = columns * weights
            paths.collect(weighted.T, self.table)
            if self.distinct:
                paths.collect(np.multiply(weighted, columns, out=weighted).T, self._squares)
        if not self.distinct and (logp is not None or logits is not None):
            width = 1 if logits is None else self.policy.shape[1]
            if self.policy.size <= width * paths.shape[1] ** 2:
                self._add_dense(paths, weights, logp, logits)
            else:
                self._add_pairs(paths, weights, logp, logits)

    def _squared_norms(self, paths: Paths, logits: np.ndarray) -> np.ndarray:
        """(N, T) ‖A_t − π(c_t)·ΣA_t‖²."""
        projected = logits - paths.everything(self._probability) * logits.sum(axis=2, keepdims=True)
        return np.einsum("ntv,ntv->nt", projected, projected)

    def _add_dense(self, paths: Paths, weights: np.ndarray, logp: np.ndarray | None, logits: np.ndarray | None) -> None:
        """Each rollout's gradient in full, where the table is small."""
        flat = each_gradient(paths, self.policy, logp, logits).reshape(len(paths), -1)
        self._others += float(weights @ np.einsum("nd,nd->n", flat, flat))

    def _add_pairs(self, paths: Paths, weights: np.ndarray, logp: np.ndarray | None, logits: np.ndarray | None) -> None:
        """Inner products of each pair of tokens that share a context, where the table is large."""
        contexts = np.ascontiguousarray(paths.contexts.T)
        steps = len(contexts)
        if logits is not None:
            projected = logits - paths.everything(self._probability) * logits.sum(axis=2, keepdims=True)
            for later in range(steps):
                for earlier in range(later + 1):
                    rows = np.flatnonzero(contexts[earlier] == contexts[later])
                    inner = np.einsum("nv,nv->n", projected[rows, earlier], projected[rows, later])
                    self._others += (1 if earlier == later else 2) * float(weights[rows] @ inner)
        elif logp is not None:
            norm = (self._probability**2).sum(axis=1)
            tokens, probability = np.ascontiguousarray(paths.tokens.T), paths.chosen(self._probability)
            columns, probability = np.ascontiguousarray(logp.T), np.ascontiguousarray(probability.T)
            for later in range(steps):
                for earlier in range(later + 1):
                    rows = np.flatnonzero(contexts[earlier] == contexts[later])
                    kernel = (
                        (tokens[earlier, rows] == tokens[later, rows]).astype(float)
                        - probability[earlier, rows]
                        - probability[later, rows]
                        + norm[contexts[later, rows]]
                    )
                    kernel *= columns[earlier, rows] * columns[later, rows]
                    self._others += (1 if earlier == later else 2) * float(weights[rows] @ kernel)


def each_gradient(paths: Paths, policy: np.ndarray, logp: np.ndarray | None, logits: np.ndarray | None) -> np.ndarray:
    """(N, C, V) each rollout's gradient with respect to logits; either leaf may be None."""
    contexts, vocabulary = policy.shape
    row = np.arange(len(paths))[:, None]
    each: np.ndarray = np.zeros((len(paths), contexts, vocabulary))
    if logits is not None:
        np.add.at(each.reshape(-1, vocabulary), row * contexts + paths.contexts, logits)
    if logp is not None:
        cell = (row * contexts + paths.contexts) * vocabulary + paths.tokens
        each += np.bincount(cell.ravel(), logp.ravel(), each.size).reshape(each.shape)
    return each - np.exp(policy) * each.sum(axis=2, keepdims=True)
