"""What training leaves behind: exact measurements of every run at the steps that were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MEASURED = ("reward", "kl", "objective", "kl_to_optimum", "gap", "entropy", "gradient_norm", "logged")
"""The columns of a History that have a number for each recorded step and run."""


@dataclass(frozen=True, eq=False)
class History:
    """Measurements at K recorded `steps` (numbers of updates done), for R runs in the order in which they were given.

    All of shape (K, R), and exact but the last two:
    `reward` E_π[R]; `kl` KL(π‖ref), `entropy` H(π), over whole rollouts, nats; `objective` J_β = E_π[R] − β·KL(π‖ref);
    `kl_to_optimum` KL(π‖π*) and `gap` J* − J_β, NaN where β = 0, for which there is no π*, or where not asked for;
    `gradient_norm` the Euclidean norm of the gradient that is followed from there, before any clipping; `logged` the
    KL that the estimator logs there: its metrics["kl"], else what it returned, per rollout; NaN without an estimator.

    `diverged` (R,) int is the update at which a run was stopped, −1 where none was; `logits` (R, C, V) are the last.
    """

    steps: np.ndarray
    reward: np.ndarray
    kl: np.ndarray
    objective: np.ndarray
    kl_to_optimum: np.ndarray
    gap: np.ndarray
    entropy: np.ndarray
    gradient_norm: np.ndarray
    logged: np.ndarray
    diverged: np.ndarray
    logits: np.ndarray

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self.diverged)

    def rows(self) -> Iterator[dict[str, float | int]]:
        """One dictionary for each run and recorded step: `run`, `step`, every measurement, and `diverged`."""
        for run in range(len(self)):
            for index, step in enumerate(self.steps):
                numbers = {name: float(getattr(self, name)[index, run]) for name in MEASURED}
                yield {"run": run, "step": int(step), **numbers, "diverged": int(self.diverged[run])}
