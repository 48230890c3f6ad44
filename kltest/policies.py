"""Softmax tables: the policies for which everything is exact."""

from __future__ import annotations

import numpy as np

from kltest.errors import WorldError


def table(logits: np.ndarray, *, what: str = "policy") -> np.ndarray:
    """(C, V) log-probabilities of a table of logits, each row normalised; −∞ and NaN are refused."""
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 2:
        raise WorldError(f"the {what}'s logits must be a (contexts, tokens) table, not of shape {logits.shape}")
    if not np.isfinite(logits).all():
        raise WorldError(f"the {what}'s logits must be finite; they contain NaN or infinity")
    return _log_softmax(logits)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    # The largest term is taken out of the sum, so that log π of an all but certain token is −1e-35 and not 0.
    largest = np.argmax(logits, axis=1)[:, None]
    shifted = logits - np.take_along_axis(logits, largest, axis=1)
    others = np.exp(shifted)
    np.put_along_axis(others, largest, 0.0, axis=1)
    return shifted - np.log1p(others.sum(axis=1, keepdims=True))


def softmax_gradient(weights: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Gradient with respect to logits of a function whose gradient with respect to the log-probs is `weights`.

    Both (C, V). log π = logits − logsumexp(logits), so the gradient is weights − π·Σ_v weights.
    """
    # weights·(1 − π) − π·Σ_others weights: the same, without cancelling where one token is all but certain.
    likeliest = np.argmax(log_probs, axis=1)[:, None]
    rest = weights.copy()
    np.put_along_axis(rest, likeliest, 0.0, axis=1)
    rest = rest.sum(axis=1, keepdims=True)
    others = rest - weights + np.take_along_axis(weights, likeliest, axis=1)
    np.put_along_axis(others, likeliest, rest, axis=1)
    return -np.expm1(log_probs) * weights - np.exp(log_probs) * others
