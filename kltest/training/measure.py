"""Exact measurements of many policies at once, by dynamic programming over contexts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kltest.environments import END, Environment
from kltest.training.sums import Policy, total
from kltest.training.world import World
from kltest.truth import optimum


class Measure:
    """E[R], KL(π‖ref), H(π) and, where asked for, KL(π‖π*) and J* of the runs of a world."""

    def __init__(self, world: World, *, optima: bool) -> None:
        self.world = world
        environment = world.environment
        ends = environment.successors == END
        # (K, V, C)
        self._following = torch.from_numpy(np.where(ends, 0, environment.successors).transpose(2, 1, 0).copy())
        self._chance = torch.from_numpy(np.where(ends, 0.0, environment.probabilities).transpose(2, 1, 0).copy())
        self._starts = torch.from_numpy(environment.start)
        self._prompts = torch.from_numpy(environment.prompts)
        self._reached = _reached(environment)
        self._reward, self._log_reference = torch.from_numpy(world.reward), torch.from_numpy(world.log_reference)
        self._beta = torch.from_numpy(world.beta)
        self._optimal: Tensor | None = None
        self._best: Tensor | None = None
        if optima:
            self._optimal, self._best = self._optima()

    def _optima(self) -> tuple[Tensor, Tensor]:
        """(T or 1, V, C, R) log π* and (R,) J*; NaN where β = 0. Solved once for runs that share problem and β."""
        solved: dict[tuple[int, float], tuple[np.ndarray, float]] = {}
        shape = (self.world.environment.n_contexts, self.world.environment.vocabulary)
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
        tables = np.stack(policies, axis=-1).swapaxes(1, 2)
        return torch.from_numpy(np.ascontiguousarray(tables)), torch.tensor(values, dtype=torch.float64)

    def __call__(self, policy: Policy) -> dict[str, np.ndarray]:
        """(R,) each, by name."""
        log_policy, chances = torch.from_numpy(policy.log_probs), torch.from_numpy(policy.chances)
        vocabulary, contexts, runs = log_policy.shape
        fixed = [self._reward, log_policy - self._log_reference, -log_policy]
        own = 0 if self._optimal is None else 1
        value = torch.zeros((contexts, 3 + own, runs), dtype=torch.float64)
        for step in reversed(range(self.world.environment.horizon)):
            here = self._reached[step]
            earlier = torch.zeros_like(value)
            for token in range(vocabulary):
                costs = [table[token].index_select(0, here) for table in fixed]
                if self._optimal is not None:
                    best = self._optimal[min(step, len(self._optimal) - 1), token]
                    costs.append(log_policy[token].index_select(0, here) - best.index_select(0, here))
                worth = torch.stack(costs, dim=1)
                if step < self.world.environment.horizon - 1:
                    worth = worth + self._onward(value, here, token)
                earlier.index_add_(0, here, worth * chances[token].index_select(0, here).unsqueeze(1))
            value = earlier
        first = torch.from_numpy(total((value.index_select(0, self._starts) * self._prompts.view(-1, 1, 1)).numpy()))
        reward, kl, entropy = first[0], first[1], first[2]
        objective = reward - self._beta * kl
        unknown = torch.full_like(reward, torch.nan)
        found = {
            "reward": reward,
            "kl": kl,
            "objective": objective,
            "entropy": entropy,
            "kl_to_optimum": first[3] if own else unknown,
            "gap": unknown if self._best is None else self._best - objective,
        }
        return {name: values.numpy() for name, values in found.items()}

    def _onward(self, value: Tensor, here: Tensor, token: int) -> Tensor:
        """(C', k, R): what a token leads to in the contexts `here`, expected, of values (C, k, R)."""
        expected = torch.zeros(())
        for following, chance in zip(self._following[:, token], self._chance[:, token], strict=True):
            reached = value.index_select(0, following.index_select(0, here))
            expected = expected + reached * chance.index_select(0, here).view(-1, 1, 1)
        return expected


def _reached(environment: Environment) -> list[Tensor]:
    """Which contexts can be met at time 0, 1, …"""
    here, found = environment.start_distribution() > 0, []
    for _ in range(environment.horizon):
        found.append(torch.from_numpy(np.flatnonzero(here)))
        here = environment.transition.T @ np.repeat(here.astype(float), environment.vocabulary) > 0
    return found
