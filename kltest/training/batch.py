"""The rollouts of one update: enumerated with their chances, or drawn from each run's own uniforms.

Every sum over the rows of a run is taken along the last axis of contiguous memory, and every draw compares a uniform
with a cumulative sum: neither depends on which other runs there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from math import comb, factorial, prod

import numpy as np
import torch
from torch import Tensor

from kltest.environments import END, Environment
from kltest.errors import UsageError, WorldError

MOST_ROWS = 2**21
"""Rows of all groups together that are enumerated in exact mode."""
UNIFORMS = 2**21
"""Uniforms that are kept ahead for all runs of a chunk."""
FEW_TOKENS = 8
"""So many tokens are compared one by one with a uniform, more by bisection."""


@dataclass(frozen=True)
class Batch:
    """M rows of up to T tokens for each of R runs; shared by the runs where a leading axis is missing.

    `cells` (R, M·T) or (M·T,) int are c·V + v, 0 where dead; `live` (R, M, T) or (M, T) bool, None where all are.
    `weights` (R, M) are the rows' shares in the gradient and `prompt` (R, M) or (M,) their prompts. Rows of one group
    stand together, `group_size` of them; None where a group is all the rows of a prompt. `exact` rows are expectations.
    """

    shape: tuple[int, int, int]
    cells: Tensor
    live: Tensor | None
    weights: Tensor
    prompt: Tensor
    group_size: int | None
    rollouts: int
    exact: bool
    everything: bool = False

    def chosen(self, table: Tensor) -> Tensor:
        """(R, M, T) entries of an (R, C, V) table at the tokens taken; anything where dead."""
        if self.everything:
            return table.reshape(self.shape)
        flat = table.reshape(self.shape[0], -1)
        if self.cells.dim() == 1:
            return flat.index_select(1, self.cells).view(self.shape)
        return flat.gather(1, self.cells).view(self.shape)

    def next_tokens(self, table: Tensor) -> Tensor:
        """(R, M, T, V) rows of an (R, C, V) table at the contexts visited; anything where dead."""
        contexts = self.cells // table.shape[2]
        if contexts.dim() == 1:
            return table.index_select(1, contexts).view(*self.shape, -1)
        offset = torch.arange(len(table)).view(-1, 1) * table.shape[1]
        return table.reshape(-1, table.shape[2]).index_select(0, (contexts + offset).view(-1)).view(*self.shape, -1)

    def collect(self, values: Tensor, like: Tensor) -> Tensor:
        """(R, C, V) sums of values (R, M, T), or (R, M, T, V) of all next tokens, zero where dead, by cell."""
        if self.everything and values.dim() == 3:
            return values.reshape(like.shape)
        runs, _, vocabulary = like.shape
        cells = self.cells if self.cells.dim() == 2 else self.cells.expand(runs, -1)
        if values.dim() == 4:
            first = cells // vocabulary * vocabulary
            cells = (first.unsqueeze(-1) + torch.arange(vocabulary)).view(runs, -1)
        return torch.zeros_like(like).view(runs, -1).scatter_add_(1, cells, values.reshape(runs, -1)).view(like.shape)

    def along(self, values: Tensor) -> Tensor:
        """(R, M) sums of values (R, M, T) over live tokens."""
        if values.shape[2] == 1:
            return values.squeeze(2)
        return (values if self.live is None else torch.where(self.live, values, 0.0)).sum(dim=2)

    @cached_property
    def groups(self) -> Tensor:
        """(R, M) int: a number for each group, different for each run."""
        runs, rows, _ = self.shape
        run = torch.arange(runs).view(-1, 1)
        if self.group_size is None:
            return run * (int(self.prompt.max()) + 1) + self.prompt
        return run * (rows // self.group_size) + torch.arange(rows) // self.group_size

    def mean(self, values: Tensor) -> Tensor:
        """(R, M) mean of values (R, M) over the rows of each row's group; in exact mode over all rows of its prompt."""
        runs, rows, _ = self.shape
        if self.group_size is not None and self.group_size > 1:
            grouped = values.view(runs, -1, self.group_size)
            return (grouped.sum(dim=2, keepdim=True) / self.group_size).expand(grouped.shape).reshape(runs, rows)
        if self.group_size == 1 and not self.exact:
            return values
        mean = torch.zeros_like(values)
        for prompt in range(int(self.prompt.max()) + 1):
            here = (self.prompt == prompt).to(values.dtype) * self.weights
            total = here.sum(dim=1, keepdim=True)
            average = (here * values).sum(dim=1, keepdim=True) / torch.where(total > 0, total, 1.0)
            mean = torch.where(self.prompt == prompt, average, mean)
        return mean

    def size(self) -> Tensor | int:
        """How many rows there are in each row's group: an int, or (R, M)."""
        if self.group_size is not None:
            return self.group_size
        if int(self.prompt.max()) == 0:
            return self.rollouts
        same = self.prompt.expand(self.shape[:2])
        return torch.stack([(same == prompt).sum(dim=1) for prompt in range(int(same.max()) + 1)], 1).gather(1, same)


class Enumerated:
    """Every rollout with its chance under the sampler, or every group of `group_size` rollouts of one prompt."""

    def __init__(self, environment: Environment, runs: int, group_size: int | None) -> None:
        paths = environment.enumerate()
        self.environment, self.runs, self.group_size = environment, runs, group_size or 1
        rows, share = _groups(paths.prompt, self.group_size)
        cells = paths.contexts * environment.vocabulary + paths.tokens
        length = paths.shape[1]
        self._of_rollouts = torch.from_numpy(cells.reshape(-1)), torch.from_numpy(paths.mask)
        self._log_weight = torch.from_numpy(paths.log_weight)
        self._rows, self._share = torch.from_numpy(rows), torch.from_numpy(share)
        self._cells = torch.from_numpy(cells[rows].reshape(-1))
        self._live = torch.from_numpy(paths.mask[rows]) if paths.padded else None
        self._prompt = torch.from_numpy(paths.prompt[rows])
        self._shape = (runs, len(rows), length)
        chance = torch.from_numpy(environment.prompts)
        self._prompt_chance = chance[torch.from_numpy(paths.prompt)]
        cell_count = environment.n_contexts * environment.vocabulary
        self._everything = (
            length == 1 and len(rows) == cell_count and bool((self._cells == torch.arange(cell_count)).all())
        )

    def draw(self, log_sampler: Tensor, step: int) -> Batch:
        """All rows, weighted by the sampler's chances; `step` is of no account."""
        runs = len(log_sampler)
        cells, live = self._of_rollouts
        log_chance = log_sampler.reshape(runs, -1).index_select(1, cells).view(runs, *live.shape)
        chance = (torch.where(live, log_chance, 0.0).sum(dim=2) + self._log_weight).exp()
        if self.group_size > 1:
            given_prompt = (chance / self._prompt_chance).index_select(1, self._rows)
            each = given_prompt.view(runs, -1, self.group_size)
            together = each[:, :, 0].clone()
            for member in range(1, self.group_size):
                together *= each[:, :, member]
            together *= self._share * self.environment_prompts()
            chance = (together / self.group_size).repeat_interleave(self.group_size, dim=1)
        return Batch(
            self._shape, self._cells, self._live, chance, self._prompt, self.group_size, 1, True, self._everything
        )

    def environment_prompts(self) -> Tensor:
        """(groups,) the chance of each group's prompt."""
        return torch.from_numpy(self.environment.prompts)[self._prompt[:: self.group_size]]


def _groups(prompt: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(G·size,) the rollouts of all groups, and (G,) in how many orders each group can be drawn."""
    if size == 1:
        return np.arange(len(prompt)), np.ones(len(prompt))
    pools = [np.flatnonzero(prompt == each) for each in np.unique(prompt)]
    count = sum(comb(len(pool) + size - 1, size) for pool in pools)
    if count * size > MOST_ROWS:
        raise WorldError(
            f"there are {count:,} groups of {size} rollouts, {count * size:,} rows, and at most {MOST_ROWS:,} are "
            "enumerated for every update. Use smaller groups, a smaller world, or sampled training (batch_size)"
        )
    members = [group for pool in pools for group in combinations_with_replacement(pool.tolist(), size)]
    orders = [factorial(size) / prod(factorial(group.count(row)) for row in set(group)) for group in members]
    return np.array(members).reshape(-1), np.array(orders)


class Drawn:
    """Rollouts drawn from each run's own stream of uniforms, keyed by its seed.

    For each update a run takes `batch_size` uniforms for the prompts, where there are several, then as many for the
    tokens of each time step and, between two steps, for where they lead, where dynamics are stochastic.
    With `counted`, rollouts of one token are the rows of every arm, weighted by how often it was drawn.
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
        if group_size is not None and batch_size % group_size:
            raise UsageError(f"a batch of {batch_size} rollouts cannot be cut into groups of {group_size}")
        self.environment, self.batch_size, self.group_size, self.steps = environment, batch_size, group_size, steps
        self._generators = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]
        contexts, vocabulary, branches = environment.successors.shape
        self.several, self.stochastic = len(environment.prompts) > 1, branches > 1
        horizon = environment.horizon
        self._draws = self.several + horizon + (horizon - 1) * self.stochastic
        self._shape = (len(seeds), batch_size, horizon)
        self._ahead = max(1, UNIFORMS // (len(seeds) * self._draws * batch_size))
        self._block: np.ndarray = np.empty(0)
        self._first = 0
        self._successors = torch.from_numpy(environment.successors.reshape(contexts * vocabulary, branches))
        chances = environment.probabilities.reshape(contexts * vocabulary, branches)
        self._arrivals = torch.from_numpy(chances.cumsum(axis=1))
        self._prompts = torch.from_numpy(environment.prompts.cumsum())
        self._starts = torch.from_numpy(environment.start)
        self._cells = contexts * vocabulary
        self._counted = (
            counted
            and horizon == 1
            and self._cells <= batch_size
            and group_size is None
            and bool((environment.start == np.arange(contexts)[: len(environment.start)]).all())
            and len(environment.start) == contexts
        )

    def draw(self, log_sampler: Tensor, step: int) -> Batch:
        """`batch_size` rollouts of each run, all of the same weight."""
        runs, batch, horizon = self._shape
        uniforms = iter(self._uniforms(step).unbind(1))
        cumulative = log_sampler.exp().cumsum(dim=2)
        prompt = torch.zeros((runs, batch), dtype=torch.int64)
        if self.several:
            uniform = next(uniforms)
            if self.group_size is not None:
                uniform = uniform[:, :: self.group_size].repeat_interleave(self.group_size, dim=1)
            prompt = _position(self._prompts.expand(runs, -1), uniform.contiguous())
        cells = torch.zeros(self._shape, dtype=torch.int64)
        live = torch.ones(self._shape, dtype=torch.bool)
        context = self._starts[prompt]
        for step_ in range(horizon):
            alive = context != END
            here = torch.where(alive, context, 0)
            token = _token(cumulative, here, next(uniforms))
            cell = here * cumulative.shape[2] + token
            cells[:, :, step_], live[:, :, step_] = torch.where(alive, cell, 0), alive
            if step_ < horizon - 1:
                branch = _branch(self._arrivals, cell, next(uniforms)) if self.stochastic else 0
                following = self._successors[cell, branch]
                context = torch.where(alive, following, END)
        if self._counted:
            return self._as_counts(cells.view(runs, batch))
        return Batch(
            self._shape,
            cells.view(runs, -1),
            None if bool(live.all()) else live,
            torch.full((runs, batch), 1.0 / batch, dtype=torch.float64),
            prompt,
            self.group_size,
            batch,
            False,
        )

    def _as_counts(self, cells: Tensor) -> Batch:
        runs, batch = cells.shape
        counts = torch.zeros((runs, self._cells), dtype=torch.float64)
        counts.scatter_add_(1, cells, torch.ones((), dtype=torch.float64).expand(runs, batch))
        arms = torch.arange(self._cells)
        return Batch(
            (runs, self._cells, 1),
            arms,
            None,
            counts / batch,
            arms // self.environment.vocabulary,
            None,
            batch,
            False,
            True,
        )

    def _uniforms(self, step: int) -> Tensor:
        """(R, draws, B) of an update; updates are asked for in order."""
        runs, batch, _ = self._shape
        if not self._first <= step < self._first + len(self._block):
            ahead = min(self._ahead, self.steps + 1 - step)
            block = np.empty((runs, ahead, self._draws * batch))
            for run, generator in enumerate(self._generators):
                generator.random(out=block[run])
            self._block = np.ascontiguousarray(block.swapaxes(0, 1)).reshape(ahead, runs, self._draws, batch)
            self._first = step
        return torch.from_numpy(self._block[step - self._first])


def _position(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """(R, B) how many entries of (R, V) cumulative sums each uniform (R, B) has reached, the last one left out."""
    return torch.searchsorted(cumulative.contiguous(), uniform, right=True).clamp_(max=cumulative.shape[1] - 1)


def _token(cumulative: Tensor, context: Tensor, uniform: Tensor) -> Tensor:
    """(R, B) tokens by (R, C, V) cumulative chances in the contexts (R, B)."""
    runs, contexts, vocabulary = cumulative.shape
    if contexts == 1:
        return _position(cumulative.view(runs, vocabulary), uniform.contiguous())
    if vocabulary > FEW_TOKENS:
        row = (context + torch.arange(runs).view(-1, 1) * contexts).view(-1)
        rows = cumulative.reshape(-1, vocabulary).index_select(0, row)
        return _position(rows, uniform.reshape(-1, 1)).view(uniform.shape)
    flat, first = cumulative.view(runs, -1), context * vocabulary
    token = torch.zeros_like(context)
    for each in range(vocabulary - 1):
        token += uniform >= flat.gather(1, first + each)
    return token


def _branch(arrivals: Tensor, cell: Tensor, uniform: Tensor) -> Tensor:
    """(R, B) which successor of each cell is reached."""
    branch = torch.zeros_like(cell)
    for each in range(arrivals.shape[1] - 1):
        branch += uniform >= arrivals[:, each][cell]
    return branch
