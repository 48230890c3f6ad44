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
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        contexts, vocabulary, branches = environment.successors.shape
        self._several, self._stochastic = len(environment.prompts) > 1, branches > 1
        self._draws = self._several + self.horizon + (self.horizon - 1) * self._stochastic
        ahead = max(1, min(UNIFORMS // (self.runs * self._draws * batch_size), steps + 1))
        self._raw = np.empty((self.runs, ahead * self._draws * batch_size))
        self._block = np.empty((ahead, self._draws, batch_size, self.runs))
        self._first = -ahead
        self._ends = _may_end(environment)
        # Contexts of all runs are numbered through: r·C + c.
        offsets = np.arange(self.runs)[:, None] * contexts
        self._starts = torch.from_numpy(environment.start + offsets)
        self._own = torch.from_numpy(offsets[:, 0].copy())
        successors = environment.successors.reshape(contexts, vocabulary, branches).transpose(2, 1, 0)[:, :, None]
        following = np.where(successors == END, END, successors + offsets)
        self._following = torch.from_numpy(following.reshape(branches, -1)) if self.horizon > 1 else torch.empty(0)
        arrivals = environment.probabilities.cumsum(axis=2).transpose(2, 1, 0)[:-1]
        self._arrivals = torch.from_numpy(np.ascontiguousarray(arrivals))
        self._prompts = environment.prompts.cumsum().tolist()[:-1]
        few = vocabulary <= min(batch_size, FEW)
        self._counted = counted and self.horizon == 1 and contexts == 1 and few and group_size is None
        self._shares = torch.full((batch_size, self.runs), 1.0 / batch_size, dtype=torch.float64)
        self._arms = torch.arange(vocabulary * self.runs) if self._counted else torch.empty(0)

    def draw(self, sampler: Policy, step: int) -> Batch:
        """The rollouts of an update; updates are asked for in order."""
        uniforms = self._uniforms(step)
        if self._counted:
            return self._counts(sampler, uniforms[0])
        left = iter(torch.from_numpy(uniforms).unbind(0))
        vocabulary, runs, contexts = sampler.chances.shape
        few = vocabulary <= FEW
        prompt = self._prompt(next(left)) if self._several else None
        row = self._starts[:, 0].expand(self.batch_size, runs)
        if prompt is not None:
            row = self._starts.t().gather(0, prompt)
        cumulative = _cumulative(sampler.chances, few=few)
        cells, alive = [], []
        for step_ in range(self.horizon):
            if self._ends:
                alive.append(row != END)
                row = torch.where(alive[-1], row, self._own)
            cell = _cells(row.reshape(-1), cumulative, runs * contexts, next(left).reshape(-1), few=few)
            cells.append(cell)
            if step_ < self.horizon - 1:
                row = self._follow(cell, next(left) if self._stochastic else None).view(row.shape)
                if self._ends:
                    row = torch.where(alive[-1], row, END)
        return Batch(
            (self.batch_size, runs, self.horizon),
            torch.stack(cells, dim=1).view(-1) if len(cells) > 1 else cells[0],
            torch.stack(alive, dim=2) if self._ends else None,
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
        return Batch((vocabulary, runs, 1), self._arms, None, weights, None, None, self.batch_size, False, planes=True)

    def _prompt(self, uniform: Tensor) -> Tensor:
        if self.group_size is not None:
            uniform = uniform[:: self.group_size].repeat_interleave(self.group_size, dim=0)
        return torch.stack([uniform >= cumulative for cumulative in self._prompts]).sum(dim=0)

    def _follow(self, cell: Tensor, uniform: Tensor | None) -> Tensor:
        """Where the tokens at these cells lead: a context's number, or −1."""
        if uniform is None:
            return self._following[0].index_select(0, cell)
        branches, vocabulary, contexts = len(self._following), *self._arrivals.shape[1:]
        size = self.runs * contexts
        here = cell // size * contexts + cell % size % contexts
        branch = torch.zeros_like(cell)
        for reached in self._arrivals.view(branches - 1, vocabulary * contexts).unbind(0):
            branch += uniform.reshape(-1) >= reached.index_select(0, here)
        return self._following.view(-1).index_select(0, branch * (vocabulary * size) + cell)

    def _uniforms(self, step: int) -> np.ndarray:
        """(draws, B, R) of an update."""
        if step >= self._first + len(self._block):
            for own, generator in zip(self._raw, self._generators, strict=True):
                generator.random(out=own)
            np.copyto(self._block.reshape(-1, self.runs), self._raw.T)
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


def _cumulative(chances: Tensor, *, few: bool) -> Tensor:
    """Cumulative chances, the last left out: (V − 1, R·C) of few tokens, (R·C, V − 1) of many."""
    vocabulary = len(chances)
    if not few:
        return chances.view(vocabulary, -1).t().contiguous().cumsum(dim=1)[:, :-1].contiguous()
    planes = list(chances.view(vocabulary, -1)[:-1].unbind(0))
    for token in range(1, len(planes)):
        planes[token] = planes[token - 1] + planes[token]
    return torch.stack(planes) if planes else chances.new_empty((0, chances[0].numel()))


def _cells(row: Tensor, cumulative: Tensor, size: int, uniform: Tensor, *, few: bool) -> Tensor:
    """(N,) the cells of the tokens that uniforms choose in the contexts `row` (N,), of `size` in all."""
    if not few:
        rows = cumulative.index_select(0, row)
        return row + torch.searchsorted(rows, uniform.unsqueeze(1), right=True).squeeze(1) * size
    token: np.ndarray = np.zeros(len(row), dtype=np.int8)
    for plane in cumulative.numpy():
        token = token + (uniform.numpy() >= plane.take(row.numpy())).view(np.int8)
    return row + torch.from_numpy(np.multiply(token, size, dtype=np.int64))
