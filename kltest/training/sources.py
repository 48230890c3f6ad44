"""Rollouts of an update: all of an environment with their probabilities, or sampled ones from each run's own stream."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from math import comb

import numpy as np
import torch

from kltest.environments import END, Environment
from kltest.errors import InvalidEnvironmentError
from kltest.moments.batches import multisets
from kltest.training.batch import FEW, Batch, Policy

# Largest number of rows, over all groups, that is enumerated for an update.
MOST_ROWS = 2**20
# Uniforms of all runs together that are drawn ahead at once.
AHEAD = 2**20


class EveryRollout:
    """All rollouts as rows, weighted by probability.

    With groups of n > 1 the rows are those of every multiset of n rollouts of a prompt. The weight of a row is the
    probability that its group is drawn, in any order, divided by n.
    """

    def __init__(self, environment: Environment, runs: int, group_size: int | None) -> None:
        paths = environment.enumerate()
        self.group_size = group_size or 1
        rows, orders = _groups(paths.prompt, self.group_size)
        contexts, vocabulary = environment.n_contexts, environment.vocabulary
        cells = (paths.tokens * contexts + paths.contexts).T[:, :, None] * runs + np.arange(runs)
        live = np.broadcast_to(paths.mask.T[:, :, None], cells.shape) if paths.padded else None
        several = len(environment.prompts) > 1
        self._rollouts = _batch(cells, live, np.arange(len(paths)), None)
        self._batch = _batch(cells, live, rows, paths.prompt if several else None, self.group_size)
        if contexts == 1 and self._batch.shape == (1, vocabulary, runs):
            self._batch = replace(self._batch, planes=True)
        self._log_weight = paths.log_weight[:, None]
        self._rows = rows
        chance = environment.prompts[paths.prompt]
        self._orders = (orders * chance[rows[:: self.group_size]] / self.group_size)[:, None]
        self._prompt_chance = chance[:, None]

    def draw(self, sampler: Policy) -> Batch:
        """All rows with their weights under a sampler."""
        chances = np.exp(self._rollouts.along(self._rollouts.chosen(sampler.log_probs)) + self._log_weight)
        if self.group_size > 1:
            members = (chances / self._prompt_chance).take(self._rows, axis=0)
            group = self._orders
            for place in range(self.group_size):
                group = group * members[place :: self.group_size]
            chances = group.repeat(self.group_size, axis=0)
        return replace(self._batch, weights=chances)


def _batch(
    cells: np.ndarray, live: np.ndarray | None, rows: np.ndarray, prompt: np.ndarray | None, group_size: int = 1
) -> Batch:
    """Batch of the given rows of all rollouts; the weights are filled in later."""
    taken = np.ascontiguousarray(cells[:, rows])
    return Batch(
        (taken.shape[0], taken.shape[1], taken.shape[2]),
        taken.reshape(-1),
        None if live is None else np.ascontiguousarray(live[:, rows]),
        np.zeros(()),
        None if prompt is None else prompt[rows, None],
        group_size,
        1,
        True,
    )


def _groups(prompt: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rollouts (G·size,) of all groups, and the number of orders (G,) in which each group can be drawn."""
    if size == 1:
        return np.arange(len(prompt)), np.ones(len(prompt))
    pools = [np.flatnonzero(prompt == each) for each in np.unique(prompt)]
    count = sum(comb(len(pool) + size - 1, size) for pool in pools)
    if count * size > MOST_ROWS:
        raise InvalidEnvironmentError(
            f"there are {count:,} groups of {size} rollouts, {count * size:,} rows, and at most {MOST_ROWS:,} are "
            "enumerated for every update. Use smaller groups, a smaller environment, or sampled training (batch_size)"
        )
    parts = [(pool[places], orders) for pool in pools for places, orders in multisets(len(pool), size, MOST_ROWS)]
    members, orders = map(np.concatenate, zip(*parts, strict=True))
    return members.reshape(-1), orders


class Drawn:
    """`batch_size` rollouts of each run for every update, all of the same weight.

    For an update a run takes `batch_size` uniforms for the prompts, if there are several (all rollouts of a group use
    that of the first), then as many for the tokens of each time step and, if dynamics are stochastic, for the
    transition between two steps. The choice is the number of cumulative probabilities, without the last, that the
    uniform reaches. If rollouts are single tokens of one context, `counted` makes a row of each token instead of each
    rollout, weighted by how often the token was drawn.
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
        # Contexts of all runs are numbered c·R + r, so that runs in the same context are neighbours in memory.
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
        self._tokens = np.arange(vocabulary * self.runs if self._counted else 0)

    def draw(self, sampler: Policy) -> Batch:
        """Rollouts of the next update; call it once for each, in order."""
        uniforms = self._uniforms.take()
        if self._counted:
            return self._counts(sampler, uniforms[0])
        left = iter(uniforms)
        vocabulary, contexts, runs = sampler.chances.shape
        prompt = self._prompt(next(left)) if self._several else None
        # (1, R) while all rollouts of a run share a context, then (B, R).
        row = self._starts[:1] if prompt is None else np.take_along_axis(self._starts, prompt, axis=0)
        chances = sampler.chances.reshape(vocabulary, -1)
        choose, chances = (_choose, chances) if vocabulary <= FEW else (_choose_of_many, _cumulative(chances))
        cells = np.empty((self.horizon, self.batch_size, runs), dtype=np.int64)
        alive = np.empty(cells.shape, dtype=bool) if self._ends else None
        for time, cell in enumerate(cells):
            if alive is not None:
                alive[time] = row != END
                # An ended rollout stays in a context of its own run, so that tables can be read without a condition.
                row = np.where(alive[time], row, self._own)
            token = choose(row, chances, next(left))
            np.add(np.multiply(token, runs * contexts, dtype=np.int64), row, out=cell)
            if time < self.horizon - 1:
                row = self._follow(cell, next(left) if self._stochastic else None)
                if alive is not None:
                    row = np.where(alive[time], row, END)
        return Batch(
            cells.shape, cells.reshape(-1), alive, self._shares, prompt, self.group_size, self.batch_size, exact=False
        )

    def _counts(self, sampler: Policy, uniform: np.ndarray) -> Batch:
        vocabulary, _, runs = sampler.chances.shape
        # Counts of up to 255 fit into a byte, which is faster to add up.
        kind = np.uint8 if self.batch_size < 256 else np.int64
        passed = np.full((vocabulary + 1, runs), self.batch_size, dtype=kind)
        passed[-1] = 0
        reached = uniform >= _cumulative(sampler.chances.reshape(vocabulary, -1))[:, None]
        np.add.reduce(reached.view(np.uint8), axis=1, dtype=kind, out=passed[1:-1])
        weights = np.divide(passed[:-1] - passed[1:], self.batch_size, dtype=float)
        shape = (1, vocabulary, runs)
        return Batch(shape, self._tokens, None, weights, None, None, self.batch_size, exact=False, planes=True)

    def _prompt(self, uniform: np.ndarray) -> np.ndarray:
        if self.group_size is not None:
            uniform = uniform[:: self.group_size].repeat(self.group_size, axis=0)
        return (uniform >= self._prompts[:, None, None]).sum(axis=0)

    def _follow(self, cell: np.ndarray, uniform: np.ndarray | None) -> np.ndarray:
        """Numbers of the contexts to which the tokens at these cells lead, −1 where the rollout ends."""
        if uniform is None:
            return self._following[0].take(cell)
        here = cell // self.runs
        branch = np.zeros(cell.shape, dtype=np.int64)
        for reached in self._arrivals:
            branch += uniform >= reached.take(here)
        return self._following.reshape(-1).take(branch * self._following.shape[1] + cell)


def _may_end(environment: Environment) -> bool:
    """Return whether a rollout can end before the horizon."""
    ends = ((environment.successors == END) & (environment.probabilities > 0)).any(axis=(1, 2))
    return any(ends[here].any() for here in islice(environment.reachable(), environment.horizon - 1))


def _cumulative(chances: np.ndarray) -> np.ndarray:
    """Cumulative probabilities of (V, N), without the last: (V − 1, N) for few tokens, (N, V − 1) for many."""
    if len(chances) <= FEW:
        cumulative = chances[:-1].copy()
        for token in range(1, len(cumulative)):
            cumulative[token] += cumulative[token - 1]
        return cumulative
    return np.ascontiguousarray(np.ascontiguousarray(chances.T).cumsum(axis=1)[:, :-1])


def _choose(row: np.ndarray, chances: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Tokens (B, R) that uniforms choose in the contexts `row` (B or 1, R), from few probabilities (V, N)."""
    reached = chances[0].take(row)
    token = (uniform >= reached).view(np.int8)
    # Cumulated only in the contexts visited: a deep tree has many more.
    for plane in chances[1:-1]:
        reached += plane.take(row)
        token += (uniform >= reached).view(np.int8)
    return token


def _choose_of_many(row: np.ndarray, cumulative: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """As `_choose`, from many cumulative probabilities (N, V − 1)."""
    rows = torch.from_numpy(cumulative[np.broadcast_to(row, uniform.shape)])
    return torch.searchsorted(rows, torch.from_numpy(uniform).unsqueeze(-1), right=True).squeeze(-1).numpy()


class Uniforms:
    """Uniforms from each run's own stream: `draws` times B of them for every update, in order.

    A thread draws the next stretch while training goes on; NumPy releases the interpreter lock meanwhile. Results do
    not depend on it.
    """

    def __init__(self, seeds: Sequence[int], draws: int, batch_size: int, updates: int) -> None:
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._each, self._left = draws * batch_size, updates
        self._ahead = max(1, min(AHEAD // (len(seeds) * self._each), updates))
        self._shape = (draws, batch_size, len(seeds))
        self._raw = np.empty((len(seeds), self._ahead * self._each))
        self._spare = np.empty((self._ahead, *self._shape))
        self._thread = ThreadPoolExecutor(1)
        self._coming: Future[int] = self._thread.submit(self._fill, min(self._ahead, updates))
        self._stretch = np.empty_like(self._spare)
        self._taken = self._filled = 0

    def take(self) -> np.ndarray:
        """Uniforms (draws, B, R) of the next update, a view that is overwritten once the next stretch is begun."""
        if self._taken == self._filled:
            self._filled, self._taken = self._coming.result(), 0
            self._left -= self._filled
            self._stretch, self._spare = self._spare, self._stretch
            if self._left > 0:
                self._coming = self._thread.submit(self._fill, min(self._ahead, self._left))
        self._taken += 1
        return self._stretch[self._taken - 1]

    def _fill(self, updates: int) -> int:
        raw = self._raw[:, : updates * self._each]
        for own, generator in zip(raw, self._generators, strict=True):
            generator.random(out=own)
        np.copyto(self._spare[:updates].reshape(-1, self._shape[-1]), raw.T)
        return updates
