"""Rollouts as integers, without any policy: any rows, or every rollout of a world as the tree that it is.

In prefix order the rows that share their first t + 1 tokens stand together, as one *node* of level t. What depends on
a prefix alone is computed once a node and spread over its rows, and a sum over the rows of a node is a reshape; the
(N, T) arrays of contexts and tokens are then only built for those who ask for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Paths:
    """N rollouts of up to T tokens.

    `contexts`, `tokens` (N, T) int64, zero where `mask` (N, T) bool is false; `prompt` (N,) int64;
    `log_weight` (N,) float64 is the log-probability of everything that is not the policy's choice: the prompt and the
    dynamics. `complete` says that the rows are every rollout of the world, once each, in prefix order.
    """

    contexts: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    prompt: np.ndarray
    log_weight: np.ndarray
    complete: bool = False

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, T)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @cached_property
    def padded(self) -> bool:
        """Whether any position is dead."""
        return not self.mask.all()

    def take(self, rows: np.ndarray | slice) -> Paths:
        """The given rows, in the given order, repeats allowed."""
        return Paths(self.contexts[rows], self.tokens[rows], self.mask[rows], self.prompt[rows], self.log_weight[rows])

    def split(self, size: int) -> Iterator[tuple[slice, Paths]]:
        """Consecutive parts of at most `size` rows."""
        for first in range(0, len(self), size):
            rows = slice(first, min(first + size, len(self)))
            yield rows, self.take(rows)

    def chosen(self, table: np.ndarray) -> np.ndarray:
        """(N, T) entries of a (C, V) table at the tokens taken; anything at dead positions."""
        return table[self.contexts, self.tokens]

    def everything(self, table: np.ndarray) -> np.ndarray:
        """(N, T, V) rows of a (C, V) table at the contexts visited; anything at dead positions."""
        return table[self.contexts]

    def collect(self, values: np.ndarray, into: np.ndarray) -> None:
        """Add values (N, T), or (N, T, V), to the entries of a (C, V) table that `chosen`, or `everything`, reads.

        Values at dead positions must be zero.
        """
        if values.ndim == 2:
            np.add.at(into.reshape(-1), self.contexts * into.shape[1] + self.tokens, values)
        else:
            np.add.at(into, self.contexts, values)

    def log_probability(self, log_probs: np.ndarray) -> np.ndarray:
        """(N,) log-probability of each rollout, prompt and dynamics included, under a (C, V) table of log-probs."""
        return self.log_weight + np.where(self.mask, self.chosen(log_probs), 0.0).sum(axis=1)


@dataclass(frozen=True, eq=False)
class Level:
    """The n nodes of one level: `cells` c·V + v (a slice where they are consecutive), 0 where a node is not `live`.

    `rows` is how many rollouts pass through each node: (n,), or one number for all. `live` is None if all are.
    """

    cells: np.ndarray | slice
    rows: np.ndarray | int
    live: np.ndarray | None

    def __len__(self) -> int:
        return self.cells.stop - self.cells.start if isinstance(self.cells, slice) else len(self.cells)

    @cached_property
    def starts(self) -> np.ndarray:
        """(n + 1,) the first row of each node, and the end."""
        counts = np.full(len(self), self.rows) if isinstance(self.rows, int) else self.rows
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def index(self) -> np.ndarray:
        """(n,) cells as an array."""
        return np.arange(self.cells.start, self.cells.stop) if isinstance(self.cells, slice) else self.cells

    def spread(self, values: np.ndarray, out: np.ndarray, step: int) -> None:
        """Write a value (n, …) per node into all of its rows, at one step of `out` (N, T, …)."""
        if isinstance(self.rows, int):
            out.reshape(len(self), self.rows, *out.shape[1:])[:, :, step] = values[:, None]
        else:
            out[:, step] = np.repeat(values, self.rows, axis=0)

    def collect(self, column: np.ndarray) -> np.ndarray:
        """(n, …) sums of a column (N, …) over the rows of each node."""
        if not isinstance(self.rows, int):
            return np.add.reduceat(column, self.starts[:-1], axis=0)
        if self.rows == 1:
            return column
        grouped = column.reshape(len(self), self.rows, *column.shape[1:])
        return grouped @ np.ones(self.rows) if column.ndim == 1 else grouped.sum(axis=1)

    def part(self, first: int, last: int) -> Level:
        """The nodes of the rows `first` … `last` − 1, with those rows alone."""
        rows: np.ndarray | int
        if isinstance(self.rows, int) and first % self.rows == last % self.rows == 0:
            nodes, rows = slice(first // self.rows, last // self.rows), self.rows
        else:
            starts = self.starts
            nodes = slice(
                int(np.searchsorted(starts, first, side="right")) - 1, int(np.searchsorted(starts, last, side="left"))
            )
            rows = np.diff(starts[nodes.start : nodes.stop + 1].clip(first, last))
        if isinstance(self.cells, slice):
            cells: np.ndarray | slice = slice(self.cells.start + nodes.start, self.cells.start + nodes.stop)
        else:
            cells = self.cells[nodes]
        live = None if self.live is None or self.live[nodes].all() else self.live[nodes]
        return Level(cells, rows, live)


class Tree(Paths):
    """Every rollout of a world, or a run of consecutive ones, in prefix order, kept level by level."""

    levels: tuple[Level, ...]
    vocabulary: int

    def __init__(
        self,
        levels: tuple[Level, ...],
        vocabulary: int,
        prompt: np.ndarray,
        log_weight: np.ndarray,
        *,
        complete: bool = True,
    ) -> None:
        own = {"levels": levels, "vocabulary": vocabulary, "prompt": prompt, "log_weight": log_weight}
        self.__dict__.update(own, complete=complete)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.levels)

    @cached_property
    def padded(self) -> bool:
        return any(level.live is not None for level in self.levels)

    @cached_property
    def contexts(self) -> np.ndarray:  # type: ignore[override]
        return self._spread([level.index // self.vocabulary for level in self.levels])

    @cached_property
    def tokens(self) -> np.ndarray:  # type: ignore[override]
        return self._spread([level.index % self.vocabulary for level in self.levels])

    @cached_property
    def mask(self) -> np.ndarray:  # type: ignore[override]
        if not self.padded:
            return np.ones(self.shape, dtype=bool)
        ones = [np.ones(len(level), dtype=bool) if level.live is None else level.live for level in self.levels]
        return self._spread(ones)

    def take(self, rows: np.ndarray | slice) -> Paths:
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            if step == 1 and first < last:
                levels = tuple(level.part(first, last) for level in self.levels)
                return Tree(levels, self.vocabulary, self.prompt[rows], self.log_weight[rows], complete=False)
            rows = np.arange(first, last, step)
        index = np.arange(len(self))[rows]
        cells, live = np.empty((len(index), len(self.levels)), dtype=np.int64), np.ones((len(index), 1), dtype=bool)
        live = np.repeat(live, len(self.levels), axis=1)
        for step, level in enumerate(self.levels):
            uniform = isinstance(level.rows, int)
            node = index // level.rows if uniform else np.searchsorted(level.starts, index, side="right") - 1
            cells[:, step] = level.cells.start + node if isinstance(level.cells, slice) else level.cells[node]
            if level.live is not None:
                live[:, step] = level.live[node]
        return Paths(
            cells // self.vocabulary, cells % self.vocabulary, live, self.prompt[index], self.log_weight[index]
        )

    def split(self, size: int) -> Iterator[tuple[slice, Paths]]:
        """Consecutive parts of at most `size` rows, cut between nodes where the tree is regular."""
        whole = [level.rows for level in self.levels if isinstance(level.rows, int) and level.rows <= size]
        return super().split(size // whole[0] * whole[0] if whole else size)

    def chosen(self, table: np.ndarray) -> np.ndarray:
        flat = table.reshape(-1)
        return self._spread([flat[level.cells] for level in self.levels])

    def everything(self, table: np.ndarray) -> np.ndarray:
        return self._spread([table[level.index // self.vocabulary] for level in self.levels])

    def collect(self, values: np.ndarray, into: np.ndarray) -> None:
        flat = into.reshape(-1)
        for step, level in enumerate(self.levels):
            sums = level.collect(values[:, step])
            if values.ndim == 3:
                np.add.at(into, level.index // self.vocabulary, sums)
            elif isinstance(level.cells, slice):
                flat[level.cells] += sums
            else:
                np.add.at(flat, level.cells, sums)

    def log_probability(self, log_probs: np.ndarray) -> np.ndarray:
        flat = log_probs.reshape(-1)
        total = self.log_weight.copy()
        for level in self.levels:
            values = flat[level.cells] if level.live is None else np.where(level.live, flat[level.cells], 0.0)
            if isinstance(level.rows, int):
                total.reshape(len(level), level.rows)[...] += values[:, None]
            else:
                total += np.repeat(values, level.rows)
        return total

    def _spread(self, values: list[np.ndarray]) -> np.ndarray:
        out = np.empty((*self.shape, *values[0].shape[1:]), dtype=values[0].dtype)
        for step, (level, column) in enumerate(zip(self.levels, values, strict=True)):
            level.spread(column, out, step)
        return out
