"""Reduction of a loss over the rows of a batch, found by calling it: mean, sum, or neither of them.

Let g_i be the gradient at row i's log-probs when the row is a batch of its own, and g_i(S) within a batch S. A mean has
g_i(S) = g_i/|S| and a sum g_i(S) = g_i, for every batch and row. Anything else couples rows, however small the effect:
the gradient of a batch is then not the average of its rows' own gradients, and is graded by batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kltest.errors import KltestError, TargetError
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.state import State
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.moments.moments import Reduction
from kltest.rollout import Rollout

SEVERAL = 8
# Calls, and most rows of each, of a loss that draws random numbers: a change of one gradient in a hundred shows.
OFTEN, MANY = 16, 64
Cause = Literal["draws", "state", "unknown"]
CAUSES: dict[Cause, str] = {
    "draws": "it draws random numbers. Without them (dropout off) it is graded exactly",
    "state": "it keeps state between calls{}",
    "unknown": "neither equal random numbers nor equal state make it repeat itself. It may read a clock, keep state "
    "that kltest does not see, or draw from a generator that no seed reaches",
}


class BatchOfOneError(TargetError):
    """The loss fails on one rollout and runs on more: grade it by batches or groups."""


class NonDeterministicError(TargetError):
    """The loss gives different gradients for one batch, so that they cannot be enumerated as they are.

    `why`: it "draws" from random generators, which can be restored; its gradient changes with "state" that can be
    restored, besides; or the cause is "unknown": it reads a clock, or what no seed reaches.
    """

    def __init__(self, name: str, why: Cause, where: Sequence[str] = ()) -> None:
        places = f", in {' and '.join(where[:3])}" if where else ""
        super().__init__(f"{name} gives different gradients for the same batch: {CAUSES[why].format(places)}")
        self.why = why

    @classmethod
    def of(cls, loss: Loss, call: Callable[[], RowGradients]) -> "NonDeterministicError":
        """The error of a loss that did not repeat a call; more calls find out why."""
        calls = loss.calls
        with preserved():
            draws, state = calls.draws(), calls.state.now()
            call()
            possible: dict[Cause, tuple[State, ...]] = {"draws": (draws,)} if draws.moved else {}
            possible |= {"state": (draws, state)} if (kept := calls.state.changed()) else {}
            for why, restored in possible.items():
                with calls.holding(*calls.held, *restored):
                    once, again = call(), call()
                if again.close(once.parts, again.parts):
                    return cls(loss.name, why, kept if why == "state" else ())
        return cls(loss.name, "unknown")


@dataclass
class Witness:
    """Calls of a loss on batches of known rows, and the reductions that are consistent with all of them."""

    loss: Loss
    base: Rollout
    singles: dict[int, RowGradients] = field(default_factory=dict)
    mean: bool = True
    sum: bool = True
    coupling: str = ""

    def __post_init__(self) -> None:
        self._live = live_positions(self.base)

    def call(self, rows: list[int]) -> RowGradients:
        """The gradients of a batch of these rows of the base."""
        return differentiate(self.loss, self.base.take(rows), None if self._live is None else self._live[rows])

    def single(self, row: int) -> RowGradients:
        """The gradients of a row as a batch of its own, called once."""
        if row not in self.singles:
            try:
                self.singles[row] = self.call([row])
            except KltestError as error:
                _explain_failure(self, row, error)
                raise
        return self.singles[row]

    def check_deterministic(self, row: int) -> None:
        """Raise NonDeterministicError if the same batch, of one row or of several, gives two different gradients.

        Several rows, since noise that drops one entry in ten leaves most single rows alone.
        """
        several = [each % len(self.base) for each in range(row, row + SEVERAL)]
        before = self.loss.calls.draws()
        pairs = [(self.single(row), self.call([row])), (self.call(several), self.call(several))]
        if before.moved:  # it may draw numbers that change the gradient seldom
            several = list(range(min(len(self.base), MANY)))
            first = self.call(several)
            pairs += [(first, self.call(several)) for _ in range(OFTEN)]
        if not all(again.close(once.parts, again.parts) for once, again in pairs):
            raise NonDeterministicError.of(self.loss, lambda: self.call(several))

    def check_memory(self, row: int) -> None:
        """Raise NonDeterministicError if a batch gives something else after another one than it gives in a first call.

        A loss that keeps what it saw first, by the shape of a batch, repeats itself and still depends on its past.
        """
        state = self.loss.calls.state
        if not state.changed():
            return
        one = [(row + each) % len(self.base) for each in range(SEVERAL)]
        after, names = [self.call(one)], state.changed()
        state.reset()
        self.call([(row + 1) % len(self.base)] * SEVERAL)
        after.append(self.call(one))
        state.reset()
        first = self.call(one)
        if not all(first.close(each.parts, first.parts) for each in after):
            raise NonDeterministicError(self.loss.name, "state", names)

    def look(self, rows: list[int]) -> None:
        """Call the loss on a batch of these rows and compare with each row's own gradient."""
        batch, own = self.call(rows), [self.single(row) for row in rows]
        self.mean &= _same(own, batch, len(rows))
        self.sum &= _same(own, batch, 1)
        if not (self.mean or self.sum):
            twice = len(set(rows)) < len(rows) == 2
            self.found_coupled("the same rollout twice" if twice else f"a batch of {len(rows)} rollouts")

    def found_coupled(self, words: str) -> None:
        """Record a coupling; only the first observation is kept."""
        self.mean = self.sum = False
        self.coupling = self.coupling or f"in {words} the gradient of a row is not a fixed share of what it gives alone"

    @property
    def reduction(self) -> Reduction:
        """The reduction that all batches so far agree with."""
        if not (self.mean or self.sum):
            return "coupled"
        if not self.mean:
            return "sum"
        return "per-row" if any(single.outcome.rows is not None for single in self.singles.values()) else "mean"


def probe(loss: Loss, base: Rollout, generator: np.random.Generator, *, few: bool = False) -> Witness:
    """Call a loss on single rows, on pairs of every kind and on larger batches; with `few`, on three batches in all.

    Raises BatchOfOneError if the loss fails on one rollout and runs on more, NonDeterministicError if it gives one
    batch two gradients.
    """
    witness = Witness(loss, base)
    batches = list(_few(base, generator) if few else _batches(base, generator))
    witness.check_deterministic(batches[0][0])
    witness.check_memory(batches[0][0])
    for rows in batches:
        witness.look(rows)
    return witness


def _batches(base: Rollout, generator: np.random.Generator) -> Iterator[list[int]]:
    """Batches that show couplings: equal rows, unequal lengths, equal and different prompts, more than two rows."""
    n = len(base)
    lengths = base.peek("mask").sum(dim=1).numpy()
    group = base.peek("group").numpy()
    order = generator.permutation(n)
    first = int(order[0])
    yield [first, first]
    by_length = np.argsort(lengths, kind="stable")
    yield [int(by_length[0]), int(by_length[-1])]
    yield [int(by_length[-1])] * 2
    for same in (True, False):
        mates = order[(group[order] == group[first]) == same]
        mates = mates[mates != first]
        if len(mates):
            yield [first, int(mates[0])]
            yield [int(mates[-1]), first]
    for size in (2, 2, 2, 3):
        yield [int(row) for row in generator.integers(n, size=size)]
    yield [int(row) for row in order[:8]]


def _few(base: Rollout, generator: np.random.Generator) -> Iterator[list[int]]:
    """Three batches for the same purpose: a pair, all rows with one of them twice, and one row twice."""
    order = generator.permutation(len(base)).tolist()
    yield order[:2]
    yield [order[0], *order]
    yield [order[-1]] * 2


def _same(own: list[RowGradients], batch: RowGradients, factor: float) -> bool:
    """True if `factor` times the gradient of each row of a batch is what the row gives alone."""
    if all(single.leaves == batch.leaves for single in own):
        leaves = zip(*(single.parts for single in own), strict=True)
        return batch.close_rows(tuple(np.concatenate(parts) for parts in leaves), factor)
    return all(batch.close(single.row(0), batch.row(position), factor) for position, single in enumerate(own))


def _explain_failure(witness: Witness, row: int, error: KltestError) -> None:
    """Raise BatchOfOneError if a row that fails alone does not fail among others."""
    for size in (2, 4, 8):
        try:
            witness.call([each % len(witness.base) for each in range(row, row + size)])
        except KltestError:
            continue
        raise BatchOfOneError(
            f"{witness.loss.name} fails on a batch of one rollout and runs on {size}: it needs whole groups, so "
            f"that its gradient must be graded by batches of {size} or more ({error})"
        ) from error
