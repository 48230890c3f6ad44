"""Rollouts of one update, M rows for each of R runs; sums and softmax that are a run's own to the last bit.

NumPy's order of addition depends on the memory layout: planes are added one by one, contiguous memory pairwise. The
number of runs changes the layout, and with it the rounding of every run. Here up to `FEW` terms are always added one
by one, and more always along contiguous memory, so that no run depends on the others in the tensor.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Largest number of terms that are added one by one.
FEW = 16


def total(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Sum over one axis."""
    if values.shape[axis] > FEW:
        return np.add.reduce(np.ascontiguousarray(np.moveaxis(values, axis, -1)), axis=-1)
    values = np.ascontiguousarray(values)
    if values[0].size > 1 and values.shape[-1] > 1:
        return np.add.reduce(values, axis=axis)
    # One run, or one number a plane: NumPy would add these pairwise, so that they are accumulated instead.
    return np.add.accumulate(values, axis=axis).take(-1, axis=axis)


@dataclass(frozen=True)
class Policy:
    """Softmax tables (V, C, R): log-probs, and probabilities as `chances`."""

    log_probs: np.ndarray
    chances: np.ndarray


def softmax(logits: np.ndarray, into: Policy | None = None) -> Policy:
    """Return the policy of logits (V, C, R); `into` is a policy that is no longer needed, whose memory is reused."""
    policy = into or Policy(np.empty_like(logits), np.empty_like(logits))
    shifted, powers = policy.log_probs, policy.chances
    np.subtract(logits, np.maximum.reduce(logits), out=shifted)
    np.exp(shifted, out=powers)
    mass = total(powers)
    shifted -= np.log(mass)
    powers /= mass
    return policy


def softmax_gradient(weights: np.ndarray, policy: Policy) -> np.ndarray:
    """Gradient (V, C, R) at the logits of a function whose gradient at the log-probs is `weights`."""
    gradient = policy.chances * total(weights)
    return np.subtract(weights, gradient, out=gradient)


def transposed(table: np.ndarray) -> np.ndarray:
    """Return a (V, C, R) table as (R, C, V), or the other way round."""
    return np.ascontiguousarray(table.transpose(2, 1, 0))


@dataclass(frozen=True)
class Batch:
    """M rows of up to T tokens for each of R runs.

    `shape` is (T, M, R): sums over T or M add whole planes. `cells` (T·M·R,) int are positions of the tokens in a flat
    (V, C, R) table; the cell of a dead token is an arbitrary one of the same run. `live` (T, M, R) bool is None if all
    tokens are live. `weights` (M, R) are the rows' shares in the gradient. `prompt` (M, R) or (M, 1) is None if there
    is one prompt. The rows of a group are adjacent, `group_size` of them; if that is None, a group is all rows of a
    prompt. `rollouts` is the number drawn; `exact` means that rows are enumerated. `planes` means that the rows are
    the tokens of a single context, so that a table already lists the entries of all rows in order.
    """

    shape: tuple[int, int, int]
    cells: np.ndarray
    live: np.ndarray | None
    weights: np.ndarray
    prompt: np.ndarray | None
    group_size: int | None
    rollouts: int
    exact: bool
    planes: bool = False

    def chosen(self, table: np.ndarray) -> np.ndarray:
        """Entries (T, M, R) of a table at the tokens taken; arbitrary at dead ones."""
        return (table if self.planes else table.reshape(-1).take(self.cells)).reshape(self.shape)

    def rows(self, values: np.ndarray) -> np.ndarray:
        """Return (T, M, R) as (M·R, T), as estimators see rollouts; contiguous, so that sums over T have one order."""
        return np.ascontiguousarray(values.reshape(len(values), -1).T)

    def steps(self, values: np.ndarray) -> np.ndarray:
        """Return (M·R, T) as (T, M, R)."""
        return np.ascontiguousarray(values.T).reshape(self.shape)

    def next_tokens(self, table: np.ndarray) -> np.ndarray:
        """Rows (M·R, T, V) of a table at the contexts visited; arbitrary at dead tokens."""
        contexts = self.rows(self.cells.reshape(self.shape)) % table[0].size
        taken = table.reshape(len(table), -1).take(contexts.reshape(-1), axis=1)
        return np.ascontiguousarray(taken.T).reshape(*contexts.shape, -1)

    def collect(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Add up values (T or 1, M, R), zero at dead tokens, by cell into a table shaped as `like`."""
        if self.planes:
            return values.reshape(like.shape)
        return _summed(self.cells, np.broadcast_to(values, self.shape), like)

    def collect_next(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Add up values (M·R, T, V) of all next tokens, zero at dead ones, by cell into a table shaped as `like`."""
        size = like[0].size
        contexts = self.rows(self.cells.reshape(self.shape)) % size
        return _summed(contexts[:, :, None] + np.arange(len(like)) * size, values, like)

    def along(self, values: np.ndarray) -> np.ndarray:
        """Sums (M, R) of values (T, M, R) over live tokens."""
        if self.live is not None:
            values = np.where(self.live, values, 0.0)
        return values[0] if len(values) == 1 else total(values)

    @cached_property
    def groups(self) -> np.ndarray:
        """Group numbers (M, R) int, different for each run."""
        _, rows, runs = self.shape
        if self.group_size is not None:
            group = (np.arange(rows) // self.group_size)[:, None]
        else:
            group = np.zeros((rows, 1), dtype=np.int64) if self.prompt is None else self.prompt
        return group * runs + np.arange(runs)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Mean of values (M, R) over each row's group, (M, R) or (1, R); the expectation if rows are enumerated."""
        if self.group_size is not None and not (self.exact and self.group_size == 1):
            grouped = values.reshape(-1, self.group_size, values.shape[1])
            return (total(grouped, 1) / self.group_size).repeat(self.group_size, axis=0)
        if self.prompt is None:
            return total(values * self.weights)[None]
        mean = np.zeros_like(values)
        for prompt in range(int(self.prompt.max()) + 1):
            weights = np.where(self.prompt == prompt, self.weights, 0.0)
            mass = total(weights)
            mean = np.where(self.prompt == prompt, total(values * weights) / np.maximum(mass, 1e-300), mean)
        return mean

    @property
    def sizes(self) -> np.ndarray | int:
        """Number of rollouts in each row's group; (M, R) float if that differs."""
        if self.group_size is None and self.prompt is not None:
            same = np.broadcast_to(self.prompt, self.shape[1:])
            return total((same[None] == same[:, None]).astype(float))
        return self.group_size or self.rollouts


def _summed(cells: np.ndarray, values: np.ndarray, like: np.ndarray) -> np.ndarray:
    return np.bincount(cells.reshape(-1), values.reshape(-1), like.size).reshape(like.shape)
