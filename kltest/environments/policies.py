"""Tabular softmax policies: log-probs from logits, and gradients with respect to logits."""

import numpy as np

from kltest.errors import InvalidEnvironmentError


def table(logits: np.ndarray, *, what: str = "policy") -> np.ndarray:
    """Return the log-probs (C, V) of logits (C, V), each row normalised.

    Raises:
        InvalidEnvironmentError: Logits are not a table or not finite; the message calls it that of `what`.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if logits.ndim != 2:
        raise InvalidEnvironmentError(
            f"the {what}'s logits must be a (contexts, tokens) table, not of shape {logits.shape}"
        )
    if not np.isfinite(logits).all():
        raise InvalidEnvironmentError(f"the {what}'s logits must be finite; they contain NaN or infinity")
    return _log_softmax(logits)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    # The largest term is taken out of the sum, so that log π of an all but certain token is −1e-35 and not 0.
    largest = np.argmax(logits, axis=1)[:, None]
    shifted = logits - np.take_along_axis(logits, largest, axis=1)
    others = np.exp(shifted)
    np.put_along_axis(others, largest, 0.0, axis=1)
    return shifted - np.log1p(others.sum(axis=1, keepdims=True))


def softmax_gradient(weights: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return the gradient (C, V) at the logits of a function whose gradient (C, V) at the log-probs is `weights`.

    log π = logits − logsumexp(logits), so the gradient is weights − π·Σ_v weights.
    """
    # weights·(1 − π) − π·Σ_others weights: the same, without cancelling where one token is all but certain.
    return remainder(log_probs) * weights - np.exp(log_probs) * sum_of_others(weights)


def score_norms(log_probs: np.ndarray) -> np.ndarray:
    """Return ‖∇_logits log π(v|c)‖² (C, V) = (1 − π_v)² + Σ_{u≠v} π_u²."""
    return remainder(log_probs) ** 2 + sum_of_others(np.exp(log_probs) ** 2)


def remainder(log_probs: np.ndarray) -> np.ndarray:
    """Return 1 − π (C, V), to full relative accuracy even if π is close to 1."""
    return -np.expm1(log_probs)


def sum_of_others(values: np.ndarray) -> np.ndarray:
    """Return Σ_{u≠v} values[c, u] (C, V), added up from both ends and never subtracted, so that nothing cancels."""
    # Running sums go along the longer axis of memory: if rows are short, a column at a time.
    columns = np.ascontiguousarray(values.T)
    if len(columns) > columns.shape[1]:
        zero = np.zeros((1, columns.shape[1]))
        before = np.concatenate([zero, columns[:-1].cumsum(axis=0)])
        return np.ascontiguousarray((before + np.concatenate([columns[:0:-1].cumsum(axis=0)[::-1], zero])).T)
    others = np.zeros_like(columns)
    below, above = np.zeros((2, columns.shape[1]))
    for step in range(len(columns)):
        others[step] += below
        below += columns[step]
        others[-1 - step] += above
        above += columns[-1 - step]
    return np.ascontiguousarray(others.T)
