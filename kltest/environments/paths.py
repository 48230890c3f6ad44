"""Rollout tables, as integers without any policy: arbitrary rows, or every rollout of an environment as a tree.

In prefix order the rows that share their first t + 1 tokens are adjacent and form a *node* of level t. A quantity that
depends on a prefix alone is computed once per node and spread over its rows, and a sum over the rows of a node is a
reshape. The (N, T) arrays of contexts and tokens are built only when they are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Paths:
    """N rollouts of up to T tokens.

    `contexts`, `tokens` (N, T) int64, zero where `mask` (N, T) bool is false; `prompt` (N,) int64;
    `log_weight` (N,) float64 is the log-probability of everything that is not the policy's choice: the prompt and the
    dynamics.
    """

    contexts: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    prompt: np.ndarray
    log_weight: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, T)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @cached_property
    def padded(self) -> bool:
        """Return whether any position is dead."""
        return not self.mask.all()

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number (N,) of live tokens of each rollout."""
        return self.mask.sum(axis=1)

    @cached_property
    def by_length(self) -> np.ndarray:
        """Rows (N,), the shortest first; those of one length stay in order on every processor."""
        return np.argsort(self.lengths, kind="stable")

    def take(self, rows: np.ndarray | slice) -> "Paths":
        """Return the given rows, in the given order, repeats allowed."""
        return Paths(self.contexts[rows], self.tokens[rows], self.mask[rows], self.prompt[rows], self.log_weight[rows])

    @staticmethod
    def joined(parts: "Sequence[Paths]") -> "Paths":
        """Return the rows of several tables of one width, one table after the other."""
        columns = zip(*((one.contexts, one.tokens, one.mask, one.prompt, one.log_weight) for one in parts), strict=True)
        return Paths(*map(np.concatenate, columns))

    def split(self, size: int) -> "Iterator[tuple[slice, Paths]]":
        """Yield consecutive parts of at most `size` rows."""
        for first in range(0, len(self), size):
            rows = slice(first, min(first + size, len(self)))
            yield rows, self.take(rows)

    def chosen(self, table: np.ndarray) -> np.ndarray:
        """Return the entries (N, T) of a (C, V) table at the tokens taken; arbitrary at dead positions."""
        return table[self.contexts, self.tokens]

    def everything(self, table: np.ndarray) -> np.ndarray:
        """Return the rows (N, T, V) of a (C, V) table at the contexts visited; arbitrary at dead positions."""
        return table[self.contexts]

    def collect(self, values: np.ndarray, into: np.ndarray) -> None:
        """Add values (N, T), or (N, T, V), to the entries of a (C, V) table that `chosen`, or `everything`, reads.

        Values at dead positions must be zero.
        """
        if values.ndim == 2:
            np.add.at(into.reshape(-1), self.contexts * into.shape[1] + self.tokens, values)
        else:
            np.add.at(into, self.contexts, values)

    def along(self, table: np.ndarray) -> np.ndarray:
        """Return the sum (N,) of a (C, V) table's entries over live tokens."""
        return np.where(self.mask, self.chosen(table), 0.0).sum(axis=1)

    def log_probability(self, log_probs: np.ndarray) -> np.ndarray:
        """Return the log-probability (N,) of each rollout under log-probs (C, V), prompt and dynamics included."""
        return self.log_weight + self.along(log_probs)


@dataclass(frozen=True, eq=False)
class Level:
    """The n distinct prefixes up to some step, and the cells c·V + v of their last tokens; 0 where they are not `live`.

    `cells` is (n, steps); `steps` says which columns of (N, T) they are. `rows` is how many rollouts pass through each
    node: (n,), or one number for all. `live` is of the shape of `cells`, None if all are.
    """

    steps: slice
    cells: np.ndarray
    rows: np.ndarray | int
    live: np.ndarray | None

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def starts(self) -> np.ndarray:
        """(n + 1,) the first row of each node, and the end."""
        counts = np.full(len(self), self.rows) if isinstance(self.rows, int) else self.rows
        return np.concatenate([[0], np.cumsum(counts)])

    def spread(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write values (n, steps, …) of nodes into all of their rows of `out` (N, T, …)."""
        if isinstance(self.rows, int):
            out.reshape(len(self), self.rows, *out.shape[1:])[:, :, self.steps] = values[:, None]
        else:
            out[:, self.steps] = np.repeat(values, self.rows, axis=0)

    def collect(self, values: np.ndarray) -> np.ndarray:
        """(n, steps, …) sums of `values` (N, T, …) over the rows of each node."""
        columns = values[:, self.steps].swapaxes(0, 1)
        if isinstance(self.rows, int) and self.rows == 1:
            sums = columns
        elif not isinstance(self.rows, int):
            sums = np.add.reduceat(columns, self.starts[:-1], axis=1)
        else:
            grouped = columns.reshape(len(columns), len(self), self.rows, *columns.shape[2:])
            sums = grouped @ np.ones(self.rows) if grouped.ndim == 3 else grouped.sum(axis=2)
        return sums.swapaxes(0, 1)

    def part(self, first: int, last: int) -> "Level":
        """The nodes of the rows `first` … `last` − 1, with those rows alone."""
        rows: np.ndarray | int
        if isinstance(self.rows, int) and first % self.rows == last % self.rows == 0:
            nodes, rows = slice(first // self.rows, last // self.rows), self.rows
        else:
            starts = self.starts
            before = int(np.searchsorted(starts, first, side="right")) - 1
            nodes = slice(before, int(np.searchsorted(starts, last, side="left")))
            rows = np.diff(starts[nodes.start : nodes.stop + 1].clip(first, last))
        live = None if self.live is None or self.live[nodes].all() else self.live[nodes]
        return Level(self.steps, self.cells[nodes], rows, live)


class Tree(Paths):
    """Every rollout of an environment, or consecutive ones, in prefix order, stored level by level.

    The first steps, which have few nodes, share one level, so that the cost of a part does not grow with their number.
    """

    levels: tuple[Level, ...]
    vocabulary: int

    def __init__(
        self,
        levels: tuple[Level, ...],
        vocabulary: int,
        prompt: np.ndarray,
        log_weight: np.ndarray,
    ) -> None:
        self.__dict__.update(levels=levels, vocabulary=vocabulary, prompt=prompt, log_weight=log_weight)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.levels[-1].steps.stop

    @cached_property
    def padded(self) -> bool:
        return any(level.live is not None for level in self.levels)

    @cached_property
    def contexts(self) -> np.ndarray:  # type: ignore[override]
        return self._spread([level.cells // self.vocabulary for level in self.levels])

    @cached_property
    def tokens(self) -> np.ndarray:  # type: ignore[override]
        return self._spread([level.cells % self.vocabulary for level in self.levels])

    @cached_property
    def mask(self) -> np.ndarray:  # type: ignore[override]
        if not self.padded:
            return np.ones(self.shape, dtype=bool)
        ones = [np.ones(level.cells.shape, dtype=bool) if level.live is None else level.live for level in self.levels]
        return self._spread(ones)

    @cached_property
    def by_length(self) -> np.ndarray:
        """Rows (N,), the shortest first; those of one length stay in order on every processor."""
        return np.argsort(self.lengths, kind="stable")

    def take(self, rows: np.ndarray | slice) -> Paths:
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            if step == 1 and first < last:
                levels = tuple(level.part(first, last) for level in self.levels)
                return Tree(levels, self.vocabulary, self.prompt[rows], self.log_weight[rows])
            rows = np.arange(first, last, step)
        index = np.arange(len(self))[rows]
        shape = (len(index), self.shape[1])
        cells, live = np.empty(shape, dtype=np.int64), np.ones(shape, dtype=bool)
        for level in self.levels:
            uniform = isinstance(level.rows, int)
            node = index // level.rows if uniform else np.searchsorted(level.starts, index, side="right") - 1
            cells[:, level.steps] = level.cells[node]
            if level.live is not None:
                live[:, level.steps] = level.live[node]
        contexts, tokens = np.divmod(cells, self.vocabulary)
        return Paths(contexts, tokens, live, self.prompt[index], self.log_weight[index])

    def split(self, size: int) -> Iterator[tuple[slice, Paths]]:
        """Consecutive parts of at most `size` rows, cut between nodes where the tree is regular."""
        whole = [level.rows for level in self.levels if isinstance(level.rows, int) and level.rows <= size]
        return super().split(size // whole[0] * whole[0] if whole else size)

    def chosen(self, table: np.ndarray) -> np.ndarray:
        flat = table.reshape(-1)
        return self._spread([flat[level.cells] for level in self.levels])

    def everything(self, table: np.ndarray) -> np.ndarray:
        return self._spread([table[level.cells // self.vocabulary] for level in self.levels])

    def collect(self, values: np.ndarray, into: np.ndarray) -> None:
        flat = into.reshape(-1)
        for level in self.levels:
            sums = level.collect(values)
            if values.ndim == 3:
                np.add.at(into, level.cells // self.vocabulary, sums)
            else:
                np.add.at(flat, level.cells.ravel(), sums.ravel())

    @cached_property
    def lengths(self) -> np.ndarray:
        live = [np.ones(level.cells.shape) if level.live is None else level.live for level in self.levels]
        return self._add_up(live).astype(np.int64)

    def along(self, table: np.ndarray) -> np.ndarray:
        flat = table.reshape(-1)
        values = [flat[level.cells] for level in self.levels]
        return self._add_up(
            [v if n.live is None else np.where(n.live, v, 0.0) for v, n in zip(values, self.levels, strict=True)]
        )

    def _add_up(self, values: list[np.ndarray]) -> np.ndarray:
        """Add up (N,) along each rollout the values of its nodes, (n, steps) per level."""
        total = np.zeros(len(self))
        for level, nodes in zip(self.levels, values, strict=True):
            sums = nodes[:, 0] if nodes.shape[1] == 1 else nodes.sum(axis=1)
            if isinstance(level.rows, int):
                total.reshape(len(level), level.rows)[...] += sums[:, None]
            else:
                total += np.repeat(sums, level.rows)
        return total

    def _spread(self, values: list[np.ndarray]) -> np.ndarray:
        out = np.empty((*self.shape, *values[0].shape[2:]), dtype=values[0].dtype)
        for level, columns in zip(self.levels, values, strict=True):
            level.spread(columns, out)
        return out
