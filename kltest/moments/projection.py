"""From gradients at the log-probs of tokens to gradients with respect to the policy's logits.

A_t (V,) is the gradient of a rollout at the next-token log-probs of its token t, that at the sampled token included.
The gradient with respect to the logits of context c is Σ_{t: c_t = c} (A_t − π(c)·ΣA_t). This is linear in A, so that
E[A] is taken first and projected once. A squared norm needs each rollout's own sum over the tokens that share a
context. If no two do, it is a sum over tokens too:

    ‖a·e_y − a·π(c)‖² = a²·(1 − 2π(y|c) + ‖π(c)‖²).
"""

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from kltest.environments import Paths
from kltest.environments.policies import score_norms, softmax_gradient

# Table entries in one block.
BLOCK = 2**14


class Projection:
    """Sum over weighted rollouts: `table` (C, V) = E[A], `gradient` (C, V) = E[ĝ] and `second_moment` = E‖ĝ‖².

    `squares` (C, V) is the sum of squared gradients at sampled tokens.

    Args:
        policy: (C, V) log-probs.
        distinct: True if no context occurs twice in a rollout.
    """

    def __init__(self, policy: np.ndarray, *, distinct: bool) -> None:
        self.policy = policy
        self.distinct = distinct
        self.table = np.zeros(policy.shape)
        self._others = 0.0
        self.squares = np.zeros(policy.shape)

    @property
    def gradient(self) -> np.ndarray:
        """(C, V) expected gradient with respect to logits."""
        gradient = np.empty_like(self.table)
        for rows in self._blocks():
            gradient[rows] = softmax_gradient(self.table[rows], self.policy[rows])
        return gradient

    @property
    def second_moment(self) -> float:
        """E‖ĝ‖²."""
        squares = [self.squares[rows] * score_norms(self.policy[rows]) for rows in self._blocks()]
        return self._others + float(sum(part.sum() for part in squares))

    def _blocks(self) -> Iterator[slice]:
        """Contexts, as many at a time as fit into the processor's cache."""
        step = max(1, BLOCK // self.policy.shape[1])
        return (slice(first, first + step) for first in range(0, len(self.policy), step))

    @cached_property
    def _probability(self) -> np.ndarray:
        return np.exp(self.policy)

    def add(self, paths: Paths, weights: np.ndarray, leaves: Mapping[str, np.ndarray]) -> None:
        """Add N rollouts of up to T tokens with probabilities (N,).

        `leaves` has gradients, zero at padded positions: (N, T) at `logp` and (N, T, V) at `logits`, as far as used.
        """
        if "logits" in leaves:
            full = leaves["logits"]
            if "logp" in leaves:
                full = full.copy()
                full[np.arange(len(paths))[:, None], np.arange(paths.shape[1]), paths.tokens] += leaves["logp"]
            self._add_full(paths, weights, full)
        elif "logp" in leaves:
            self._add_sampled(paths, weights, leaves["logp"])

    def _add_sampled(self, paths: Paths, weights: np.ndarray, logp: np.ndarray) -> None:
        # Transposed, so that each token's column is contiguous for the sums over prefixes.
        columns = np.ascontiguousarray(logp.T)
        weighted = columns * weights
        paths.collect(weighted.T, self.table)
        if not self.distinct and self.policy.size <= paths.shape[1] ** 2:
            # Each rollout's whole gradient is less work than all pairs of its tokens.
            each = each_gradient(paths, self.policy, logp, None)
            self._others += float(weights @ np.einsum("ncv,ncv->n", each, each))
            return
        if not self.distinct:
            self._add_pairs(paths, columns, weighted)
        weighted *= columns
        paths.collect(weighted.T, self.squares)

    def _add_pairs(self, paths: Paths, columns: np.ndarray, weighted: np.ndarray) -> None:
        """Inner products a·b·(1{y = y'} − π(y|c) − π(y'|c) + ‖π(c)‖²) of every two tokens that share a context."""
        contexts, tokens = (np.ascontiguousarray(part.T, dtype=np.int32) for part in (paths.contexts, paths.tokens))
        norm = (self._probability**2).sum(axis=1, keepdims=True)
        chance = np.ascontiguousarray(paths.chosen(self._probability).T)
        rest = np.ascontiguousarray(paths.chosen(norm - self._probability).T)
        for later in range(1, len(columns)):
            for earlier in range(later):
                kernel = rest[later] - chance[earlier]
                kernel += tokens[earlier] == tokens[later]
                kernel *= contexts[earlier] == contexts[later]
                kernel *= columns[earlier]
                self._others += 2 * float(weighted[later] @ kernel)

    def _add_full(self, paths: Paths, weights: np.ndarray, full: np.ndarray) -> None:
        paths.collect(full * weights[:, None, None], self.table)
        projected = full - paths.everything(self._probability) * full.sum(axis=2, keepdims=True)
        if self.distinct:
            self._others += float(weights @ np.einsum("ntv,ntv->n", projected, projected))
            return
        contexts, vocabulary = self.policy.shape
        cells = (np.arange(len(paths))[:, None] * contexts + paths.contexts).ravel()
        order = np.argsort(cells, kind="stable")
        first = np.flatnonzero(np.diff(cells[order], prepend=-1))
        sums = np.add.reduceat(projected.reshape(-1, vocabulary)[order], first)
        self._others += float(weights[cells[order][first] // contexts] @ np.einsum("kv,kv->k", sums, sums))


def each_gradient(paths: Paths, policy: np.ndarray, logp: np.ndarray | None, logits: np.ndarray | None) -> np.ndarray:
    """(N, C, V) each rollout's gradient with respect to the logits of `policy`, log-probs (C, V).

    `logp` (N, T) are gradients at sampled log-probs, `logits` (N, T, V) those at all next-token log-probs; both are
    zero at padded positions.
    """
    contexts, vocabulary = policy.shape
    row = np.arange(len(paths))[:, None]
    each: np.ndarray = np.zeros((len(paths), contexts, vocabulary))
    if logits is not None:
        np.add.at(each.reshape(-1, vocabulary), row * contexts + paths.contexts, logits)
    if logp is not None:
        cell = (row * contexts + paths.contexts) * vocabulary + paths.tokens
        each += np.bincount(cell.ravel(), logp.ravel(), each.size).reshape(each.shape)
    return each - np.exp(policy) * each.sum(axis=2, keepdims=True)
