"""Rollouts drawn from each run's own stream of uniforms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kltest.environments import END, Environment
from kltest.training.batch import Batch
from kltest.training.sums import FEW, Policy

UNIFORMS = 2**20
"""Uniforms that are kept ahead for all runs together."""


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
        self._generators = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]
        contexts, vocabulary, branches = environment.successors.shape
        self._several, self._stochastic = len(environment.prompts) > 1, branches > 1
        self._draws = self._several + self.horizon + (self.horizon - 1) * self._stochastic
        self._block: np.ndarray = np.empty(0)
        self._first = 0
        flat = (contexts * vocabulary, branches)
        self._successors = torch.from_numpy(environment.successors.reshape(flat))
        self._arrivals = torch.from_numpy(environment.probabilities.reshape(flat).cumsum(axis=1))
        self._prompts = environment.prompts.cumsum().tolist()[:-1]
        self._starts = torch.from_numpy(environment.start)
        self._ends = _may_end(environment)
        self._offsets = torch.arange(self.runs) * contexts
        few = vocabulary <= min(batch_size, FEW)
        self._counted = counted and self.horizon == 1 and contexts == 1 and few and group_size is None
        self._shares = torch.full((batch_size, self.runs), 1.0 / batch_size, dtype=torch.float64)

    def draw(self, sampler: Policy, step: int) -> Batch:
        """The rollouts of an update; updates are asked for in order."""
        uniforms = self._uniforms(step)
        if self._counted:
            return self._counts(sampler, uniforms[0])
        left = iter(torch.from_numpy(uniforms).unbind(0))
        vocabulary, runs, contexts = sampler.chances.shape
        prompt = self._prompt(next(left)) if self._several else None
        context = self._starts[0].expand(self.batch_size, runs) if prompt is None else self._starts[prompt]
        cumulative = _cumulative(sampler.chances)
        cells, alive = [], []
        for step_ in range(self.horizon):
            live = context != END if self._ends else None
            here = context if live is None else torch.where(live, context, 0)
            row = here + self._offsets
            token = _tokens(cumulative, vocabulary, row.reshape(-1), next(left).reshape(-1)).view(row.shape)
            cell = row + token * (runs * contexts)
            cells.append(cell if live is None else torch.where(live, cell, self._offsets))
            alive.append(live)
            if step_ < self.horizon - 1:
                local = here * vocabulary + token
                following = self._follow(local, next(left) if self._stochastic else None)
                context = following if live is None else torch.where(live, following, END)
        live_tokens = None if not self._ends else torch.stack([part for part in alive if part is not None], dim=2)
        return Batch(
            (self.batch_size, runs, self.horizon),
            (torch.stack(cells, dim=2) if len(cells) > 1 else cells[0]).view(-1),
            live_tokens,
            self._shares,
            prompt,
            self.group_size,
            self.batch_size,
            False,
        )

    def _counts(self, sampler: Policy, uniform: np.ndarray) -> Batch:
        vocabulary, runs, _ = sampler.chances.shape
        kind = np.uint8 if self.batch_size < 256 else np.int64
        counts = np.empty((vocabulary, runs))
        reached: np.ndarray | int = self.batch_size
        cumulative = np.zeros(runs)
        for token, chance in enumerate(sampler.chances[:-1, :, 0].numpy()):
            cumulative = cumulative + chance
            passed = (uniform >= cumulative).view(np.uint8).sum(axis=0, dtype=kind)
            np.subtract(reached, passed, out=counts[token])
            reached = passed
        counts[-1] = reached
        counts /= self.batch_size
        weights = torch.from_numpy(counts)
        shape = (vocabulary, runs, 1)
        return Batch(
            shape, torch.arange(vocabulary * runs), None, weights, None, None, self.batch_size, False, planes=True
        )

    def _prompt(self, uniform: Tensor) -> Tensor:
        if self.group_size is not None:
            uniform = uniform[:: self.group_size].repeat_interleave(self.group_size, dim=0)
        return torch.stack([uniform >= cumulative for cumulative in self._prompts]).sum(dim=0)

    def _follow(self, cell: Tensor, uniform: Tensor | None) -> Tensor:
        if uniform is None:
            return self._successors.view(-1).index_select(0, cell.view(-1)).view(cell.shape)
        branch = torch.zeros_like(cell)
        for each in range(self._arrivals.shape[1] - 1):
            branch += uniform >= self._arrivals[:, each][cell]
        return self._successors[cell, branch]

    def _uniforms(self, step: int) -> np.ndarray:
        """(draws, B, R) of an update."""
        if not self._first <= step < self._first + len(self._block):
            numbers = self._draws * self.batch_size
            ahead = max(1, min(UNIFORMS // (self.runs * numbers), self.steps + 1 - step))
            block = np.empty((self.runs, ahead * numbers))
            for run, generator in enumerate(self._generators):
                generator.random(out=block[run])
            self._block = np.ascontiguousarray(block.T).reshape(ahead, self._draws, self.batch_size, self.runs)
            self._first = step
        return self._block[step - self._first]


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


def _cumulative(chances: Tensor) -> Tensor:
    """Cumulative chances, the last left out: (V − 1, R·C) of few tokens, (R·C, V − 1) of many."""
    vocabulary = len(chances)
    if vocabulary > FEW:
        return chances.view(vocabulary, -1).t().contiguous().cumsum(dim=1)[:, :-1].contiguous()
    planes = list(chances.view(vocabulary, -1)[:-1].unbind(0))
    for token in range(1, len(planes)):
        planes[token] = planes[token - 1] + planes[token]
    return torch.stack(planes) if planes else chances.new_empty((0, chances[0].numel()))


def _tokens(cumulative: Tensor, vocabulary: int, row: Tensor, uniform: Tensor) -> Tensor:
    """(N,) how many of the cumulative chances of the contexts `row` (N,) each uniform has reached."""
    if vocabulary > FEW:
        rows = cumulative.index_select(0, row)
        return torch.searchsorted(rows, uniform.unsqueeze(1), right=True).squeeze(1)
    token = torch.zeros_like(row)
    for plane in cumulative.unbind(0):
        token += uniform >= plane.index_select(0, row)
    return token
