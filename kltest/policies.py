"""Softmax tables: the policies for which everything is exact."""

from __future__ import annotations

import numpy as np
from scipy.special import log_softmax

from kltest.errors import WorldError


def table(logits: np.ndarray, *, what: str = "policy") -> np.ndarray:
    """(C, V) log-probabilities of a table of logits, each row normalised; −∞ and NaN are refused."""
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 2 or not np.isfinite(logits).all():
        raise WorldError(f"the {what}'s logits must be a finite (contexts, tokens) table, not {logits.shape}")
    return log_softmax(logits, axis=1)


def softmax_gradient(weights: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Gradient with respect to logits of a function whose gradient with respect to the log-probs is `weights`.

    Both (C, V). log π = logits − logsumexp(logits), so the gradient is weights − π·Σ_v weights.
    """
    return weights - np.exp(log_probs) * weights.sum(axis=1, keepdims=True)
