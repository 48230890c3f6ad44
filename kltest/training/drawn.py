"""Rollouts drawn from each run's own stream of uniforms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kltest.environments import END, Environment
from kltest.training.batch import Batch
from kltest.training.sums import FEW, Policy
from kltest.training.uniforms import Uniforms


class Drawn:
    """`batch_size` rollouts of each run for every update, all of the same weight.

    For an update a run takes `batch_size` uniforms for the prompts, where there are several (a group takes that of its
    first rollout), then as many for the tokens of each time step and, between two steps, for where they lead, where
    dynamics are stochastic. A choice is how many of the cumulative chances, the last left out, the uniform has reached.
    With `counted`, where a rollout is one token of the only context, rows are the tokens, weighted by how often each
    was drawn.
    """

    def __init__(
        self,
        environment: Environment,
        seeds: Sequence[int],
        batch_size: int,
        group_size: int | None,
        steps: int,
        *,
        counted: bool,
    ) -> None:
        self.batch_size, self.group_size, self.steps, self.runs = batch_size, group_size, steps, len(seeds)
        self.horizon = environment.horizon
        contexts, vocabulary, branches = environment.successors.shape
        self._several, self._stochastic = len(environment.prompts) > 1, branches > 1
        draws = self._several + self.horizon + (self.horizon - 1) * self._stochastic
        self._uniforms = Uniforms(seeds, draws, batch_size, steps + 1)
        self._ends = _may_end(environment)
        # Contexts of all runs are numbered through, c·R + r: runs that stand at one place are neighbours in memory.
        self._own = np.arange(self.runs)
        self._starts = environment.start[:, None] * self.runs + self._own
        successors = environment.successors.transpose(2, 1, 0)[..., None]
        following = np.where(successors == END, END, successors * self.runs + self._own)
        self._following = following.reshape(branches, -1) if self.horizon > 1 else following[:, :, :0]
        arrivals = environment.probabilities.cumsum(axis=2).transpose(2, 1, 0)[:-1]
        self._arrivals = arrivals.reshape(branches - 1, vocabulary * contexts)
        self._prompts = environment.prompts.cumsum()[:-1]
        few = vocabulary <= min(batch_size, FEW)
        self._counted = counted and self.horizon == 1 and contexts == 1 and few and group_size is None
        self._shares = np.full((batch_size, self.runs), 1.0 / batch_size)
        self._arms = np.arange(vocabulary * self.runs if self._counted else 0)

    def draw(self, sampler: Policy, step: int) -> Batch:
        """The rollouts of an update; updates are asked for in order."""
        uniforms = self._uniforms.take()
        if self._counted:
            return self._counts(sampler, uniforms[0])
        left = iter(uniforms)
        vocabulary, contexts, runs = sampler.chances.shape
        prompt = self._prompt(next(left)) if self._several else None
        # (1, R) until rollouts part, then (B, R).
        row = self._starts[:1] if prompt is None else np.take_along_axis(self._starts, prompt, axis=0)
        chances = sampler.chances.reshape(vocabulary, -1)
        choose, chances = (_tokens, chances) if vocabulary <= FEW else (_tokens_of_many, _cumulative(chances))
        cells = np.empty((self.horizon, self.batch_size, runs), dtype=np.int64)
        alive = np.empty(cells.shape, dtype=bool) if self._ends else None
        for step_, cell in enumerate(cells):
            if alive is not None:
                alive[step_] = row != END
                row = np.where(alive[step_], row, self._own)
            token = choose(row, chances, next(left))
            np.add(np.multiply(token, runs * contexts, dtype=np.int64), row, out=cell)
            if step_ < self.horizon - 1:
                row = self._follow(cell, next(left) if self._stochastic else None)
                if alive is not None:
                    row = np.where(alive[step_], row, END)
        return Batch(
            cells.shape,
            cells.reshape(-1),
            alive,
            self._shares,
            prompt,
            self.group_size,
            self.batch_size,
            False,
        )

    def _counts(self, sampler: Policy, uniform: np.ndarray) -> Batch:
        vocabulary, _, runs = sampler.chances.shape
        kind = np.uint8 if self.batch_size < 256 else np.int64
        passed = np.full((vocabulary + 1, runs), self.batch_size, dtype=kind)
        passed[-1] = 0
        reached = uniform >= _cumulative(sampler.chances.reshape(vocabulary, -1))[:, None]
        np.add.reduce(reached.view(np.uint8), axis=1, dtype=kind, out=passed[1:-1])
        weights = np.divide(passed[:-1] - passed[1:], self.batch_size, dtype=float)
        shape = (1, vocabulary, runs)
        return Batch(shape, self._arms, None, weights, None, None, self.batch_size, False, planes=True)

    def _prompt(self, uniform: np.ndarray) -> np.ndarray:
        if self.group_size is not None:
            uniform = uniform[:: self.group_size].repeat(self.group_size, axis=0)
        return (uniform >= self._prompts[:, None, None]).sum(axis=0)

    def _follow(self, cell: np.ndarray, uniform: np.ndarray | None) -> np.ndarray:
        """Where the tokens at these cells lead: a context's number, or −1."""
        if uniform is None:
            return self._following[0].take(cell)
        here = cell // self.runs
        branch = np.zeros(cell.shape, dtype=np.int64)
        for reached in self._arrivals:
            branch += uniform >= reached.take(here)
        return self._following.reshape(-1).take(branch * self._following.shape[1] + cell)


def _may_end(environment: Environment) -> bool:
    """Whether a rollout can end before the horizon."""
    here = environment.start_distribution() > 0
    for _ in range(environment.horizon - 1):
        if ((environment.successors == END) & (environment.probabilities > 0))[here].any():
            return True
        following = environment.transition.T @ np.repeat(here.astype(float), environment.vocabulary) > 0
        if np.array_equal(following, here):
            break
        here = following
    return False


def _cumulative(chances: np.ndarray) -> np.ndarray:
    """Cumulative chances (V, N), the last left out: (V − 1, N) of few tokens, (N, V − 1) of many."""
    if len(chances) <= FEW:
        cumulative = chances[:-1].copy()
        for token in range(1, len(cumulative)):
            cumulative[token] += cumulative[token - 1]
        return cumulative
    return np.ascontiguousarray(np.ascontiguousarray(chances.T).cumsum(axis=1)[:, :-1])


def _tokens(row: np.ndarray, chances: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """(B, R) which of few tokens uniforms choose in the contexts `row` (B or 1, R), of chances (V, N)."""
    reached = chances[0].take(row)
    token = (uniform >= reached).view(np.int8)
    # Added up where rollouts stand: a deep tree has many more contexts than are visited.
    for plane in chances[1:-1]:
        reached += plane.take(row)
        token += (uniform >= reached).view(np.int8)
    return token


def _tokens_of_many(row: np.ndarray, cumulative: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """As `_tokens`, of cumulative chances (N, V − 1)."""
    rows = torch.from_numpy(cumulative[np.broadcast_to(row, uniform.shape)])
    return torch.searchsorted(rows, torch.from_numpy(uniform).unsqueeze(-1), right=True).squeeze(-1).numpy()
