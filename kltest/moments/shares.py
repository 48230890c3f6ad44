"""What batches of a costly loss give without being called, where that follows from few that are.

Most couplings are by length: whatever else is in a batch, a row's part in it is what it gives in a batch of its own
copies, times a number that depends on the row's length and on how many tokens the batch has; and a logged number is a
mean over rows, equal, by length, or by such shares. That is learnt from few batches and held against others, drawn at
random from every choice of lengths; where one of them differs, nothing is taken for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from kltest.moments.agreement import close, near
from kltest.moments.differentiate import RowGradients
from kltest.rollout import LEAVES

# So many batches, beside one of every choice of lengths, is what was learnt held against.
CHECKS = 8
Call = Callable[[np.ndarray], RowGradients]
Weigh = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Copies:
    """What every row of a pool gives in a batch of `size` copies of it.

    `parts` (rows, T) or (rows, T, V) by leaf is what one copy receives, `logged` (rows,) the number that is logged,
    None where none is; both only mean something for rows of the pool. `lengths` (rows,) are in tokens.
    """

    pool: np.ndarray
    size: int
    lengths: np.ndarray
    parts: dict[str, np.ndarray]
    logged: np.ndarray | None

    @classmethod
    def called(cls, call: Call, pool: np.ndarray, size: int, lengths: np.ndarray) -> Copies | None:
        """None where the policy is not reached in the same way by all rows."""
        own = [call(np.full(size, row)) for row in pool]
        if any(one.leaves != own[0].leaves for one in own):
            return None
        parts = {}
        for leaf in own[0].leaves:
            given = np.stack([getattr(one, leaf)[0] for one in own])
            parts[leaf] = np.zeros((len(lengths), *given.shape[1:]))
            parts[leaf][pool] = given
        numbers, logged = [_logged(one) for one in own], None
        if None not in numbers:
            logged = np.zeros(len(lengths))
            logged[pool] = numbers
        return cls(pool, size, lengths, parts, logged)

    def of(self, row: int) -> tuple[np.ndarray, ...]:
        """What one copy of a row receives, leaf by leaf."""
        return tuple(self.parts[leaf][row] for leaf in LEAVES if leaf in self.parts)

    def of_every_kind(self, generator: np.random.Generator) -> Iterator[np.ndarray]:
        """A batch of every choice of lengths, of rows drawn at random."""
        alike = {int(n): self.pool[self.lengths[self.pool] == n] for n in np.unique(self.lengths[self.pool])}
        for chosen in combinations_with_replacement(alike, self.size):
            yield np.array([generator.choice(alike[length]) for length in chosen])

    def to_check(self, generator: np.random.Generator) -> Iterator[np.ndarray]:
        """Batches to hold against what was learnt."""
        yield from self.of_every_kind(generator)
        yield from (generator.choice(self.pool, size=self.size) for _ in range(CHECKS))


@dataclass(frozen=True)
class Shares:
    """The number by which a row's part differs from that of a copy, by its length and by the tokens of the batch."""

    copies: Copies
    share: dict[tuple[int, int], float]

    @classmethod
    def learnt(cls, call: Call, copies: Copies, generator: np.random.Generator) -> Shares | None:
        """None where batches are not explained so, or give so little that nothing can be learnt from them."""
        shares = cls(copies, {})
        for rows in copies.of_every_kind(generator):
            called = call(rows)
            for place, (row, length) in enumerate(zip(rows, copies.lengths[rows], strict=True)):
                ratio = _ratio(called.row(place), copies.of(row))
                if ratio is None:
                    return None
                shares.share.setdefault((int(length), int(copies.lengths[rows].sum())), ratio)
        return shares if all(shares.explain(rows, call(rows)) for rows in copies.to_check(generator)) else None

    def explain(self, rows: np.ndarray, called: RowGradients) -> bool:
        """Whether a batch gives what it ought to."""
        factors = self.of(rows[None])[0]
        return called.leaves == self.copies.parts.keys() and all(
            close(called.row(place), self.copies.of(row), called.dtype, factors[place])
            for place, row in enumerate(rows)
        )

    def of(self, rows: np.ndarray) -> np.ndarray:
        """(N, n) for batches (N, n)."""
        lengths = self.copies.lengths[rows]
        pairs = np.stack([lengths, np.broadcast_to(lengths.sum(axis=1, keepdims=True), lengths.shape)], axis=-1)
        different, place = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
        factors = np.array([self.share[int(length), int(total)] for length, total in different])
        return factors[place].reshape(lengths.shape)

    def gradients(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """By leaf, (N, n, T) or (N, n, T, V), for batches (N, n)."""
        factors = self.of(rows)
        return {
            leaf: own[rows] * factors.reshape(factors.shape + (1,) * (own.ndim - 1))
            for leaf, own in self.copies.parts.items()
        }


def weighing(
    copies: Copies, checked: Iterable[tuple[np.ndarray, RowGradients]], shares: Shares | None = None
) -> Weigh | None:
    """What batches (N, n) log, from what copies of their rows do; None where the batches checked log something else."""
    own, lengths = copies.logged, copies.lengths
    if own is None:
        return None
    ways: list[Weigh] = [
        lambda rows: own[rows].mean(axis=1),
        lambda rows: (own[rows] * lengths[rows]).sum(axis=1) / lengths[rows].sum(axis=1),
    ]
    if shares is not None:
        ways.append(lambda rows: (own[rows] * shares.of(rows)).mean(axis=1))
    numbers = [(rows, one.dtype, _logged(one)) for rows, one in checked]
    for way in ways:
        if all(n is not None and near(way(rows[None]), np.array([n]), dtype) for rows, dtype, n in numbers):
            return way
    return None


def _logged(called: RowGradients) -> float | None:
    """The number that is logged for a batch, of rows their mean."""
    metric = called.outcome.metric
    return None if metric is None or metric.dim() > 1 else float(metric.mean())


def _ratio(part: tuple[np.ndarray, ...], own: tuple[np.ndarray, ...]) -> float | None:
    """The number by which one is a multiple of the other; None where there is nothing to tell it from."""
    square = sum(float((each**2).sum()) for each in own)
    if len(part) != len(own) or square == 0:
        return None
    return sum(float((a * b).sum()) for a, b in zip(part, own, strict=True)) / square
