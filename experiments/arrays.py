"""Random numbers by name, the code of an estimator, norms and cosines, as several experiments need them."""

import inspect
from pathlib import Path

import numpy as np

from kltest.estimators.spec import Estimator
from kltest.sweeps.store import digest

from .records import content


def generator(*parts: object) -> np.random.Generator:
    """Random numbers that depend on these values and on nothing else."""
    return np.random.default_rng(int(digest(*parts), 16))


def code_of(estimator: Estimator) -> str:
    """A short name for its file, which may stand in another package: part of a configuration, so that edits count."""
    return content(Path(inspect.getfile(inspect.unwrap(estimator.function))))


def norm(array: np.ndarray) -> float:
    """Euclidean, over all entries."""
    return float(np.linalg.norm(array))


def cosine(one: np.ndarray, other: np.ndarray) -> float | None:
    """None where either vanishes."""
    lengths = norm(one) * norm(other)
    return float((one * other).sum()) / lengths if lengths > 0 else None
