"""Random numbers by name, norms and cosines, as several experiments need them."""

import numpy as np

from kltest.sweeps.store import digest


def generator(*parts: object) -> np.random.Generator:
    """Random numbers that depend on these values and on nothing else."""
    return np.random.default_rng(int(digest(*parts), 16))


def norm(array: np.ndarray) -> float:
    """Euclidean, over all entries."""
    return float(np.linalg.norm(array))


def cosine(one: np.ndarray, other: np.ndarray) -> float | None:
    """None where either vanishes."""
    lengths = norm(one) * norm(other)
    return float((one * other).sum()) / lengths if lengths > 0 else None
