"""Equality of gradients up to the rounding of the precision in which a loss computes."""

from __future__ import annotations

import numpy as np

from kltest.moments.tolerances import TOLERANCES


def near(found: np.ndarray, expected: np.ndarray, dtype: str) -> bool:
    """True if two arrays agree up to rounding, relative to the largest entry."""
    scale = max(np.abs(found).max(initial=0.0), np.abs(expected).max(initial=0.0))
    allowed = TOLERANCES[dtype]
    return bool(np.abs(found - expected).max(initial=0.0) <= allowed.rows * scale + allowed.rows_absolute)


def close(own: tuple[np.ndarray, ...], part: tuple[np.ndarray, ...], dtype: str, factor: float = 1.0) -> bool:
    """True if two gradients agree, leaf by leaf, once the second is multiplied by `factor`."""
    if len(own) != len(part):
        return not any(array.any() for array in (*own, *part))
    return all(near(factor * b, a, dtype) for a, b in zip(own, part, strict=True))
