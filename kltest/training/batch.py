"""The rollouts of one update: M rows for each of R runs, and the sums that are taken over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kltest.training.sums import total


@dataclass(frozen=True)
class Batch:
    """M rows of up to T tokens for each of R runs; `shape` is (T, M, R), so that T and M add up plane by plane.

    `cells` (T·M·R,) int says where in a flat (V, C, R) table each token stands, at some place of its run where dead;
    `live` (T, M, R) bool, None where all are. `weights` (M, R) are the rows' shares in the gradient and `prompt`
    (M, R) or (M, 1) their prompts, None where there is one. Rows of one group stand together, `group_size` of them;
    None where a group is all the rows of a prompt. `rollouts` is how many were drawn, `exact` says that rows are
    enumerated. `planes`: the rows are the tokens of the only context, so that a table is its own list of entries.
    """

    shape: tuple[int, int, int]
    cells: Tensor
    live: Tensor | None
    weights: Tensor
    prompt: Tensor | None
    group_size: int | None
    rollouts: int
    exact: bool
    planes: bool = False

    def chosen(self, table: Tensor) -> Tensor:
        """(T, M, R) entries of a table at the tokens taken; anything where dead."""
        return (table if self.planes else table.view(-1).index_select(0, self.cells)).view(self.shape)

    def rows(self, values: Tensor) -> Tensor:
        """(M·R, T) of (T, M, R), as estimators see rollouts: contiguous, so that sums over tokens have one order."""
        return values.reshape(len(values), -1).t().contiguous()

    def steps(self, values: Tensor) -> Tensor:
        """(T, M, R) of (M·R, T)."""
        return values.t().contiguous().view(self.shape)

    def next_tokens(self, table: Tensor) -> Tensor:
        """(M·R, T, V) rows of a table at the contexts visited; anything where dead."""
        contexts = self.rows(self.cells.view(self.shape)) % table[0].numel()
        taken = table.view(len(table), -1).index_select(1, contexts.view(-1))
        return taken.t().contiguous().view(*contexts.shape, -1)

    def collect(self, values: Tensor, like: Tensor) -> Tensor:
        """A table of the sums of values (T, M, R), zero where dead, by cell."""
        if self.planes:
            return values.view(like.shape)
        return _summed(self.cells, values, like)

    def collect_next(self, values: Tensor, like: Tensor) -> Tensor:
        """A table of the sums of values (M·R, T, V) of all next tokens, zero where dead, by cell."""
        size = like[0].numel()
        contexts = self.rows(self.cells.view(self.shape)) % size
        return _summed(contexts.unsqueeze(2) + torch.arange(len(like)) * size, values, like)

    def along(self, values: Tensor) -> Tensor:
        """(M, R) sums of values (T, M, R) over live tokens."""
        return total(values if self.live is None else torch.where(self.live, values, 0.0), 0)

    @cached_property
    def groups(self) -> Tensor:
        """(M, R) int: a number for each group, different for each run."""
        _, rows, runs = self.shape
        if self.group_size is not None:
            group = (torch.arange(rows) // self.group_size).view(-1, 1)
        else:
            group = torch.zeros((rows, 1), dtype=torch.int64) if self.prompt is None else self.prompt
        return group * runs + torch.arange(runs)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values (M, R) over each row's group, as (M, R) or (1, R); in exact mode the expectation."""
        if self.group_size is not None and not (self.exact and self.group_size == 1):
            grouped = values.view(-1, self.group_size, values.shape[1])
            return (total(grouped, 1) / self.group_size).repeat_interleave(self.group_size, dim=0)
        if self.prompt is None:
            return total(values * self.weights, 0).unsqueeze(0)
        mean = torch.zeros_like(values)
        for prompt in range(int(self.prompt.max()) + 1):
            weights = torch.where(self.prompt == prompt, self.weights, 0.0)
            mass = total(weights, 0)
            mean = torch.where(self.prompt == prompt, total(values * weights, 0) / mass.clamp(min=1e-300), mean)
        return mean

    @property
    def sizes(self) -> Tensor | int:
        """How many rollouts there are in each row's group; (M, R) float where that differs."""
        if self.group_size is None and self.prompt is not None:
            same = self.prompt.expand(self.shape[1:])
            return total((same.unsqueeze(0) == same.unsqueeze(1)).to(torch.float64), 0)
        return self.group_size or self.rollouts


def _summed(cells: Tensor, values: Tensor, like: Tensor) -> Tensor:
    sums = np.bincount(cells.numpy().ravel(), values.numpy().ravel(), like.numel())
    return torch.from_numpy(sums).view(like.shape)
