"""When two gradients that ought to be equal count as equal, at the precision in which a loss computes."""

from __future__ import annotations

import numpy as np

# Relative to the larger of the two: well above rounding, well below any effect that a batch could have on a row.
_RELATIVE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# What rounding leaves where terms of order 1 cancel.
_ABSOLUTE = {"float64": 1e-14, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}


def near(found: np.ndarray, expected: np.ndarray, dtype: str) -> bool:
    """Whether two arrays agree up to rounding, relative to the largest entry."""
    scale = max(np.abs(found).max(initial=0.0), np.abs(expected).max(initial=0.0))
    allowed = _RELATIVE.get(dtype, 1e-9) * scale + _ABSOLUTE.get(dtype, 1e-14)
    return bool(np.abs(found - expected).max(initial=0.0) <= allowed)


def close(own: tuple[np.ndarray, ...], part: tuple[np.ndarray, ...], dtype: str, factor: float = 1.0) -> bool:
    """Whether two gradients, leaf by leaf, agree once the second is multiplied by `factor`."""
    if len(own) != len(part):
        return not any(array.any() for array in (*own, *part))
    return all(near(factor * b, a, dtype) for a, b in zip(own, part, strict=True))
