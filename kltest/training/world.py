"""The numbers of many runs in one world as tensors: what they share, and what each has for itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kltest.training.problems import Problem, Run, check_alike


class World:
    """R runs: `start`, `log_reference` and `reward` are (R, C, V); `beta` and `rate` (R, 1, 1); dynamics are shared."""

    def __init__(self, runs: Sequence[Run]) -> None:
        problems = [run.problem for run in runs]
        self.environment = check_alike(problems)
        self.runs = runs
        self.shape = (len(runs), self.environment.n_contexts, self.environment.vocabulary)
        self.start = _stacked(problems, lambda problem: np.asarray(problem.start, dtype=float))
        self.log_reference = _stacked(problems, lambda problem: problem.log_reference)
        self.reward = _stacked(problems, lambda problem: problem.environment.reward)
        self.beta = torch.tensor([run.beta for run in runs], dtype=torch.float64).view(-1, 1, 1)
        self.rate = torch.tensor([run.learning_rate for run in runs], dtype=torch.float64).view(-1, 1, 1)


def _stacked(problems: Sequence[Problem], read: object) -> Tensor:
    """(R, C, V) of what is read from each problem, once where several runs share one."""
    tables: dict[int, np.ndarray] = {}
    for problem in problems:
        if id(problem) not in tables:
            tables[id(problem)] = read(problem)  # type: ignore[operator]
    return torch.from_numpy(np.stack([tables[id(problem)] for problem in problems]))


def log_softmax(logits: Tensor) -> Tensor:
    """(R, C, V) log-probs, by operations whose bits do not depend on how many rows there are."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted - shifted.exp().sum(dim=-1, keepdim=True).log()
