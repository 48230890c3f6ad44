"""Exact measurements of many policies at once, by dynamic programming over contexts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kltest.environments import END
from kltest.training.sums import by_run
from kltest.training.world import World
from kltest.truth import optimum


class Measure:
    """E[R], KL(π‖ref), H(π) and, where asked for, KL(π‖π*) and J* of the runs of a world."""

    def __init__(self, world: World, *, optima: bool) -> None:
        self.world = world
        environment = world.environment
        ends = environment.successors == END
        self._following = torch.from_numpy(np.where(ends, 0, environment.successors).reshape(-1))
        self._chance = torch.from_numpy(np.where(ends, 0.0, environment.probabilities))
        self._start = torch.from_numpy(environment.start_distribution())
        self._reward, self._log_reference = by_run(world.reward), by_run(world.log_reference)
        self._optimal: Tensor | None = None
        self._best: Tensor | None = None
        if optima:
            self._optimal, self._best = self._optima()

    def _optima(self) -> tuple[Tensor, Tensor]:
        """(R, T or 1, C, V) log π* and (R,) J*; NaN where β = 0. Solved once for runs that share problem and β."""
        solved: dict[tuple[int, float], tuple[np.ndarray, float]] = {}
        shape = self._reward.shape[1:]
        steps = 1 if self.world.environment.tree else self.world.environment.horizon
        policies, values = [], []
        for run in self.world.runs:
            asked = (id(run.problem), run.beta)
            if asked not in solved:
                if run.beta > 0:
                    found = optimum(run.problem.environment, run.problem.reference, run.beta)
                    solved[asked] = (found.policy, found.value)
                else:
                    solved[asked] = (np.full(shape, np.nan), np.nan)
            policy, value = solved[asked]
            policies.append(np.broadcast_to(policy, (steps, *shape)))
            values.append(value)
        return torch.from_numpy(np.stack(policies)), torch.tensor(values, dtype=torch.float64)

    def __call__(self, log_probs: Tensor) -> dict[str, Tensor]:
        """(R,) each, by name, for (V, R, C) log-probs."""
        log_policy = by_run(log_probs)
        runs, contexts, _ = log_policy.shape
        chances = log_policy.exp()
        fixed = [self._reward, log_policy - self._log_reference, -log_policy]
        own = 0 if self._optimal is None else 1
        value = torch.zeros((runs, 3 + own, contexts), dtype=torch.float64)
        for step in reversed(range(self.world.environment.horizon)):
            costs = list(fixed)
            if self._optimal is not None:
                costs.append(log_policy - self._optimal[:, min(step, self._optimal.shape[1] - 1)])
            value = ((torch.stack(costs, dim=1) + self._onward(value)) * chances.unsqueeze(1)).sum(dim=3)
        first = (value * self._start).sum(dim=2)
        reward, kl, entropy = first[:, 0], first[:, 1], first[:, 2]
        objective = reward - self.world.beta * kl
        unknown = torch.full_like(reward, torch.nan)
        return {
            "reward": reward,
            "kl": kl,
            "objective": objective,
            "entropy": entropy,
            "kl_to_optimum": first[:, 3] if own else unknown,
            "gap": unknown if self._best is None else self._best - objective,
        }

    def _onward(self, value: Tensor) -> Tensor:
        """(R, k, C) → (R, k, C, V): the expected value of where each token leads."""
        reached = value.index_select(2, self._following).view(*value.shape[:2], *self._chance.shape)
        return (reached * self._chance).sum(dim=4)
