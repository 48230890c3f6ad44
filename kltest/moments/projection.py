"""From gradients at the log-probs of tokens to gradients with respect to the policy's logits.

With A_t the gradient of a rollout at its token t's next-token log-probs (the sampled one's share included), the
gradient with respect to the logits of context c is Σ_{t: c_t = c} (A_t − π(c)·ΣA_t). The map is linear for each
context, so an expectation is taken of A first and projected once; a squared norm needs each rollout's own sum over the
tokens that share a context.
"""

from __future__ import annotations

import numpy as np

from kltest.policies import softmax_gradient


class Projection:
    """Adds up weighted rollouts: E[A] per context and token, and E‖ĝ‖²."""

    def __init__(self, policy: np.ndarray, *, tree: bool) -> None:
        self.policy = policy
        self.tree = tree
        self.table = np.zeros(policy.shape)
        self.second_moment = 0.0
        self._probability = np.exp(policy)
        self._square = (self._probability**2).sum(axis=1)

    @property
    def gradient(self) -> np.ndarray:
        """(C, V) expected gradient with respect to logits."""
        return softmax_gradient(self.table, self.policy)

    def add(
        self,
        contexts: np.ndarray,
        tokens: np.ndarray,
        weights: np.ndarray,
        logp: np.ndarray | None,
        logits: np.ndarray | None,
    ) -> None:
        """Rollouts (B, T) of probability `weights` (B,); gradients at padded positions must be zero."""
        if logits is not None:
            full = logits.copy() if logp is not None else logits
            if logp is not None:
                full[np.arange(len(full))[:, None], np.arange(full.shape[1]), tokens] += logp
            self._add_full(contexts, weights, full)
        elif logp is not None:
            self._add_sampled(contexts, tokens, weights, logp)

    def _add_sampled(self, contexts: np.ndarray, tokens: np.ndarray, weights: np.ndarray, logp: np.ndarray) -> None:
        vocabulary = self.policy.shape[1]
        cell = contexts * vocabulary + tokens
        weighted = logp * weights[:, None]
        self.table += np.bincount(cell.ravel(), weighted.ravel(), self.policy.size).reshape(self.policy.shape)
        if self.tree:
            squares = np.bincount(cell.ravel(), (weighted * logp).ravel(), self.policy.size).reshape(self.policy.shape)
            self.second_moment += float((squares * (1 - 2 * self._probability + self._square[:, None])).sum())
        else:
            full = np.zeros((*logp.shape, vocabulary))
            np.put_along_axis(full, tokens[..., None], logp[..., None], axis=2)
            self._add_shared(contexts, weights, full)

    def _add_full(self, contexts: np.ndarray, weights: np.ndarray, full: np.ndarray) -> None:
        vocabulary = self.policy.shape[1]
        weighted = (full * weights[:, None, None]).reshape(-1, vocabulary)
        for token in range(vocabulary):
            self.table[:, token] += np.bincount(contexts.ravel(), weighted[:, token], len(self.policy))
        if self.tree:
            total = full.sum(axis=2)
            norms = (
                (full**2).sum(axis=2)
                - 2 * total * (full * self._probability[contexts]).sum(axis=2)
                + total**2 * self._square[contexts]
            )
            self.second_moment += float(weights @ norms.sum(axis=1))
        else:
            self._add_shared(contexts, weights, full)

    def _add_shared(self, contexts: np.ndarray, weights: np.ndarray, full: np.ndarray) -> None:
        projected = full - self._probability[contexts] * full.sum(axis=2, keepdims=True)
        same = contexts[:, :, None] == contexts[:, None, :]
        gram = np.einsum("btv,bsv->bts", projected, projected, optimize=True)
        self.second_moment += float(weights @ np.where(same, gram, 0.0).sum(axis=(1, 2)))
