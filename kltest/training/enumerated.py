"""All rollouts of an environment with their probabilities under the sampler, or all groups of rollouts of a prompt."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import numpy as np

from kltest.environments import Environment
from kltest.errors import InvalidEnvironmentError
from kltest.moments.batches import multisets
from kltest.training.batch import Batch
from kltest.training.sums import Policy

MOST_ROWS = 2**20
"""Largest number of rows, over all groups, that is enumerated for an update."""


class Enumerated:
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

    def draw(self, sampler: Policy, step: int) -> Batch:
        """All rows with their weights under a sampler, whatever the `step`."""
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
    members, orders = zip(*(group for pool in pools for group in multisets(pool, size)), strict=True)
    return np.array(members).reshape(-1), np.array(orders)
