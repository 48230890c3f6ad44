"""Divergences of next-token distributions, row by row, without the cancellation of the textbook forms.

Tables of log-probabilities are (…, V); sums run over the last axis. Every sum is of terms of one sign, so it keeps its
relative accuracy if the distributions nearly agree or one token has nearly all the probability.
"""

import numpy as np

_SMALL = 0.5


def difference(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return p − q, elementwise."""
    u = log_p - log_q
    close = np.exp(log_q) * np.expm1(np.where(np.abs(u) < _SMALL, u, 0.0))
    return np.where(np.abs(u) < _SMALL, close, np.exp(log_p) - np.exp(log_q))


def kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return KL(p‖q) = Σ p·(e^(−u) − 1 + u), u = log p − log q: equal to Σ p·u, but with no negative term."""
    u = log_p - log_q
    p = np.exp(log_p)
    small = np.abs(u) < _SMALL
    return np.where(small, p * _exp_minus_one_minus(np.where(small, -u, 0.0)), np.exp(log_q) - p + p * u).sum(axis=-1)


def chi_square(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return χ²(p‖q) = Σ (p − q)²/q, inf if that exceeds float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        # As (p − q)·(p/q − 1): q may be too small for its inverse.
        return (difference(log_p, log_q) * np.expm1(log_p - log_q)).sum(axis=-1)


def total_variation(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return ½ Σ |p − q|."""
    return 0.5 * np.abs(difference(log_p, log_q)).sum(axis=-1)


def _exp_minus_one_minus(x: np.ndarray) -> np.ndarray:
    """e^x − 1 − x for |x| < ½, by its series: the closed form loses all digits near 0."""
    # x²/2·(1 + x/3·(1 + x/4·(…))): what is left out is below 1e-16 of the sum.
    inner = np.ones_like(x)
    for power in range(14, 2, -1):
        inner = 1.0 + x / power * inner
    return x * x / 2 * inner
