"""The numbers of many runs in one world as arrays: what they share, and what each has for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kltest.training.problems import Problem, Run, check_alike
from kltest.training.sums import by_token


class World:
    """R runs. Tables are (V, C, R), tokens first: sums over few tokens are then sums of long vectors.

    `start` are logits, `log_reference` and `reward` tables; `beta` and `rate` are (R,). Dynamics are shared.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        problems = [run.problem for run in runs]
        self.environment = check_alike(problems)
        self.runs = runs
        self.start = _stacked(problems, lambda problem: np.asarray(problem.start, dtype=float))
        self.log_reference = _stacked(problems, lambda problem: problem.log_reference)
        self.reward = _stacked(problems, lambda problem: problem.environment.reward)
        self.beta = np.array([run.beta for run in runs], dtype=float)
        self.rate = np.array([run.learning_rate for run in runs], dtype=float)


def _stacked(problems: Sequence[Problem], read: Callable[[Problem], np.ndarray]) -> np.ndarray:
    """(V, C, R) of the table that is read from each problem, once where several runs share one."""
    tables: dict[int, np.ndarray] = {}
    for problem in problems:
        if id(problem) not in tables:
            tables[id(problem)] = read(problem)
    return by_token(np.stack([tables[id(problem)] for problem in problems]))
