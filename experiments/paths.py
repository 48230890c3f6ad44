"""Paths of training with exact expectations, update by update, in several environments at once."""

from collections.abc import Iterable, Sequence

import numpy as np

from kltest.environments import Environment
from kltest.sweeps.store import digest
from kltest.training import Problem, Run, train


def seed_of(*words: object) -> int:
    """Return a seed that depends on these values and on nothing else."""
    return int(digest(words)[:8], 16)


def problems(environment: Environment, names: Iterable[Sequence[object]], distance: float) -> list[Problem]:
    """Draw a reference, a start so far from it, and normal rewards of prefixes and tokens, for each of some names."""
    return [Problem.draw(environment, seed_of(*name), distance=distance, reward="normal") for name in names]


def ascents(problems: Sequence[Problem], updates: int, *, beta: float, learning_rate: float) -> np.ndarray:
    """(updates + 1, draws, C, V) logits of plain ascent on E[R] − β·KL, the start first."""
    logits = [np.stack([one.start for one in problems])]
    for _ in range(updates):
        # One update at a time, as the history keeps the last logits alone.
        runs = [
            Run(Problem(one.environment, here, one.reference), "k1-reward", beta=beta, learning_rate=learning_rate)
            for one, here in zip(problems, logits[-1], strict=True)
        ]
        logits.append(np.asarray(train(runs, steps=1, optima=False).logits))
    return np.stack(logits)
