"""Reactions of a loss to being called: if it repeats itself, and how it combines the rows of a batch."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import numpy as np

from kltest.errors import KltestError, TargetError
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.state import State
from kltest.moments.caller import Caller
from kltest.moments.differentiate import RowGradients
from kltest.rollout import Rollout

SEVERAL, FEW = 8, 2
# Calls, and most rows of each, of a loss that draws random numbers: a change of one gradient in a hundred shows.
OFTEN, MANY = 16, 64
Taken = TypeVar("Taken")
Cause = Literal["draws", "state", "unknown"]
CAUSES: dict[Cause, str] = {
    "draws": "it draws random numbers. Without them (dropout off) it is graded exactly",
    "state": "it keeps state between calls{}",
    "unknown": "neither equal random numbers nor equal state make it repeat itself. It may read a clock, keep state "
    "that kltest does not see, or draw from a generator that no seed reaches",
}


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
            draws, state = calls.draws(), calls.kept()
            call()
            possible: dict[Cause, tuple[State, ...]] = {"draws": (draws,)} if draws.changed() else {}
            possible |= {"state": (draws, state)} if (kept := calls.state.changed()) else {}
            for why, restored in possible.items():
                with calls.holding(*calls.held, *restored):
                    once, again = call(), call()
                if again.close(once.parts, again.parts):
                    return cls(loss.name, why, kept if why == "state" else ())
        return cls(loss.name, "unknown")


def probe(loss: Loss, base: Rollout, generator: np.random.Generator) -> Caller:
    """Call a loss on single rows and on batches that show couplings: equal rows, unequal lengths, all.

    Raises BatchOfOneError if the loss fails on one rollout and runs on more, NonDeterministicError if it gives one
    batch two gradients.
    """
    caller, order = Caller(loss, base), generator.permutation(len(base)).tolist()
    by_length = np.argsort(base.peek("mask").sum(dim=1).numpy(), kind="stable").tolist()
    _check_repeats(caller, order[0])
    _check_memory(caller, order[0])
    pairs = [order[0]] * 2, order[:2], [by_length[0], by_length[-1]]
    # A loss that goes through its rows in blocks shows it in batches of odd size, or of even size.
    for rows in (*pairs, [order[0], *order[:2]]):
        caller.look(rows)

    def both(rows: list[int]) -> None:
        for some in (rows[1:], rows):
            caller.look(some)

    _most_taken([order[0], *order], both)
    return caller


def _most_taken(rows: list[int], call: Callable[[list[int]], Taken]) -> tuple[list[int], Taken]:
    """Return the most of the rows that a loss takes, halved where it fails, and what a call with them gives."""
    while True:
        try:
            return rows, call(rows)
        except KltestError:
            if len(rows) <= FEW:
                raise
            rows = rows[: max(FEW, len(rows) // 2)]


def _check_repeats(caller: Caller, row: int) -> None:
    """Raise NonDeterministicError if the same batch, of one row or of several, gives two different gradients.

    Several rows, since noise that drops one entry in ten leaves most single rows alone.
    """
    before, alone = caller.loss.calls.draws(), (caller.single(row), caller.call([row]))
    several, first = _several(caller, row)
    pairs = [alone, (first, caller.call(several))]
    if before.changed():  # it may draw numbers that change the gradient seldom
        several = several if len({*several}) < SEVERAL else list(range(min(len(caller.base), MANY)))
        first = caller.call(several)
        pairs += [(first, caller.call(several)) for _ in range(OFTEN)]
    if not all(again.close(once.parts, again.parts) for once, again in pairs):
        raise NonDeterministicError.of(caller.loss, lambda: caller.call(several))


def _several(caller: Caller, row: int) -> tuple[list[int], RowGradients]:
    """Return as many rows as the loss takes, up to SEVERAL, and their gradients."""
    return _most_taken([each % len(caller.base) for each in range(row, row + SEVERAL)], caller.call)


def _check_memory(caller: Caller, row: int) -> None:
    """Raise NonDeterministicError if a batch gives something else after another one than it gives in a first call.

    A loss that keeps what it saw first, by the shape of a batch, repeats itself and still depends on its past.
    """
    state = caller.loss.calls.state
    if not state.changed():
        return
    one, found = _several(caller, row)
    after, names = [found], state.changed()
    state.reset()
    caller.call([(row + 1) % len(caller.base)] * len(one))
    after.append(caller.call(one))
    state.reset()
    first = caller.call(one)
    if not all(first.close(each.parts, first.parts) for each in after):
        raise NonDeterministicError(caller.loss.name, "state", names)
