"""The smallest world in which a loss still fails, with numbers so simple that a person can redo them on paper.

Worlds are tried smallest first (tokens, actions, fixed or ragged length, sampler, size of the batch), each filled with
unrelated simple probabilities, in which a loss that can fail there does. In the first that fails, one context after the
other is then given the simplest probabilities with which it still does: uniform and equal to the reference, equal to
the reference, one of the two uniform. How much is tried is counted in calls of the loss, not in seconds, so that a
rerun finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kltest.counterexample.environment import SmallEnvironment
from kltest.counterexample.reproduction import reproduced
from kltest.counterexample.small_worlds import adds_up, at_once, differs, measure, worked
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row
from kltest.identify.identification import tolerance
from kltest.report import CounterExample
from kltest.truth import combine

if TYPE_CHECKING:
    from kltest.environments import Instance

Probabilities = tuple[float, ...]
Rows = tuple[Probabilities, Probabilities, Probabilities | None]

# By the number of actions: uniform, or nearly, first, then the simplest others; decimals, to be copied as printed.
SIMPLE: dict[int, tuple[Probabilities, ...]] = {
    2: ((0.5, 0.5), (0.8, 0.2), (0.25, 0.75), (0.9, 0.1), (0.6, 0.4), (0.2, 0.8), (0.75, 0.25)),
    3: ((0.25, 0.25, 0.5), (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.4, 0.4, 0.2), (0.2, 0.4, 0.4), (0.6, 0.2, 0.2)),
    4: ((0.25,) * 4, (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4), (0.4, 0.2, 0.2, 0.2), (0.2, 0.2, 0.2, 0.4)),
}
SIZES = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2), (3, 3))
# As mild as the worlds of grading, so that what fails here fails for the reason for which it failed there.
MILD, MILD_RATIO = 2.0, 1.0
MOST_CALLS, MOST_BATCHES = 600, 100
# A difference that shows in six decimals, or a tenth of what was found where that is smaller.
VISIBLE = 1e-3
GIVES_REWARDS = frozenset({"reward", "advantage", "group", "rollout"})


class Shape(NamedTuple):
    """A world without its probabilities; `moved`: the sampler is another policy."""

    length: int
    actions: int
    ends: bool
    moved: bool
    batch: int

    @property
    def kind(self) -> str:
        """The name that such a world has in grading."""
        return "bandit" if self.length == 1 else "ragged" if self.ends else "sequence"

    @property
    def contexts(self) -> int:
        return sum(self._going_on**depth for depth in range(self.length))

    @property
    def rollouts(self) -> int:
        return self.contexts * self.ends + self._going_on**self.length

    @property
    def _going_on(self) -> int:
        return self.actions - self.ends


def smallest_failure(findings: Findings) -> CounterExample | None:
    """The smallest world in which the first row that disagrees, exactly, still does, or None where none was found."""
    row = next((row for row in findings.rows if row.wrong and row.method == "exact"), None)
    return None if row is None else Search(findings, row).smallest()


def example(findings: Findings) -> CounterExample | None:
    """What the gradient is in a small world where nothing is wrong with it; None where it cannot be said."""
    loss, sampler = findings.loss, findings.samplers[-1]
    length = 1 if set(findings.environments) <= {"bandit"} else 2
    whole = max((row.batch for row in findings.rows), default=1)
    for tokens, batch in ((length, 2), (1, whole)) if findings.coupled else ((length, 1),):
        shape = Shape(tokens, 2, ends=False, moved=sampler == "stale", batch=batch)
        world = unrelated(shape, 0, paid=bool(loss.takes & GIVES_REWARDS))
        with suppress(KltestError):
            summed = adds_up(loss, world, sampler, batch)
            answer = worked(loss, findings.expect, world, sampler, batch, 0.0, summed=summed)
            if answer is not None and not answer[2]:
                return answer[0]
    return None


@dataclass
class Search:
    """Looks for the smallest world in which a row still fails; `calls` is how often the loss was called for it."""

    findings: Findings
    row: Row
    calls: int = 0
    _summed: dict[int, bool] = field(default_factory=dict)
    _failing: dict[tuple[SmallEnvironment, int], bool] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        return min(VISIBLE, self.row.relative_bias / 10)

    def smallest(self) -> CounterExample | None:
        loss, sampler = self.findings.loss, self.row.sampler
        paid = bool(loss.takes & GIVES_REWARDS)
        for shape, variant in product(self.shapes(), range(2)):
            world = unrelated(shape, variant, paid=paid)
            if self.fails(world, shape.batch):
                world = self.simplified(world, shape)
                try:
                    summed = self._adds_up(world, shape.batch)
                    answer = worked(loss, self.findings.expect, world, sampler, shape.batch, self.limit, summed=summed)
                except KltestError:
                    return None
                if answer is None or not answer[2]:
                    return None
                return reproduced(loss, self.findings.expect, answer[0], answer[1])
        return None

    def shapes(self) -> Iterator[Shape]:
        """Smallest first, without those of a kind in which the loss was found right."""
        batches = sorted({2, self.row.batch}) if self.row.batch > 1 else [1]
        samplers = (False, True) if self.row.sampler == "stale" else (False,)
        for size, ends, moved, batch in product(SIZES, (False, True), samplers, batches):
            shape = Shape(*size, ends, moved, batch)
            possible = (shape.length > 1 or not ends) and (batch == 1 or shape.rollouts**batch <= MOST_BATCHES)
            if possible and not self._found_right(shape):
                yield shape

    def _found_right(self, shape: Shape) -> bool:
        where = (shape.kind, "stale" if shape.moved else "current")
        same = [row for row in self.findings.rows if (row.environment, row.sampler) == where]
        return bool(same) and all(row.agrees is True for row in same)

    def fails(self, world: SmallEnvironment, batch: int) -> bool:
        """Whether the expected gradient there is visibly another than the declared one."""
        if (world, batch) not in self._failing:
            try:
                self._failing[world, batch] = self.calls <= MOST_CALLS and self._fails(world, batch)
            except KltestError:
                self._failing[world, batch] = False
        return self._failing[world, batch]

    def _fails(self, world: SmallEnvironment, batch: int) -> bool:
        instance, loss, sampler = world.instance(), self.findings.loss, self.row.sampler
        if not _mild(instance):
            return False
        if batch == 1 and not self.findings.coupled:
            self.calls += 1
            found, dtype = at_once(loss, instance, sampler, summed=self.findings.observed.reduction == "sum")
        else:
            self.calls += len(instance.paths) ** batch
            measured = measure(loss, instance, sampler, batch, summed=self._adds_up(world, batch))
            found, dtype = measured.expected, measured.dtype
        target = combine(self.findings.expect, instance)
        return differs(found, target, instance, max(tolerance(dtype), self.limit))

    def _adds_up(self, world: SmallEnvironment, batch: int) -> bool:
        """Asked once for each size, of the first world that comes: there nothing is equal by chance."""
        if batch not in self._summed:
            self._summed[batch] = adds_up(self.findings.loss, world, self.row.sampler, batch)
        return self._summed[batch]

    def simplified(self, world: SmallEnvironment, shape: Shape) -> SmallEnvironment:
        """Context by context, the last first, the simplest probabilities with which it still fails, until none is."""
        options = list(_options(shape))
        before: SmallEnvironment | None = None
        while world != before:
            before = world
            for context in reversed(range(shape.contexts)):
                world = self._first(world, (_with_rows(world, context, rows) for rows in options), shape.batch)
            world = self._first(world, _with_rewards(world, shape), shape.batch)
        return world

    def _first(self, world: SmallEnvironment, simpler: Iterable[SmallEnvironment], batch: int) -> SmallEnvironment:
        """The first that fails; they come in the order of simplicity, so that none after the world itself is wanted."""
        return next((other for other in simpler if other == world or self.fails(other, batch)), world)


def unrelated(shape: Shape, variant: int, *, paid: bool) -> SmallEnvironment:
    """Simple probabilities that have nothing to do with each other: what can differ does, as in a random world."""
    near = _near(shape.actions, MILD / shape.length)
    ratios = _near(shape.actions, MILD_RATIO / shape.length)
    generator = np.random.default_rng([variant, shape.length, shape.actions, shape.ends])

    def one_of(choices: Iterable[Probabilities]) -> Probabilities:
        listed = list(choices)
        return listed[generator.integers(len(listed))]

    policy = [one_of(p for p in near if p in ratios or not shape.moved) for _ in range(shape.contexts)]
    reward = tuple(tuple(float(c % shape.actions == a) for a in range(shape.actions)) for c in range(shape.contexts))
    return SmallEnvironment(
        policy=tuple(policy),
        reference=tuple(one_of(near[p]) for p in policy),
        sampler=tuple(one_of(ratios[p]) for p in policy) if shape.moved else None,
        length=shape.length,
        ends=shape.ends,
        reward=reward if paid else None,
    )


def _options(shape: Shape) -> Iterator[Rows]:
    """(policy, reference, sampler) of one context, the simplest first."""
    uniform, *others = SIMPLE[shape.actions]
    equal = [(uniform, uniform), *((other, other) for other in others[:2])]
    apart = [(other, uniform) for other in others] + [(uniform, other) for other in others]
    for policy, reference in (*equal, *apart):
        yield policy, reference, policy if shape.moved else None
    if shape.moved:
        for policy, reference in (*equal, *apart):
            yield from ((policy, reference, other) for other in (uniform, *others[:3]) if other != policy)


def _with_rows(world: SmallEnvironment, context: int, rows: Rows) -> SmallEnvironment:
    tables: list[Sequence[Sequence[float]] | None] = []
    for table, row in zip((world.policy, world.reference, world.sampler), rows, strict=True):
        tables.append(None if table is None or row is None else (*table[:context], row, *table[context + 1 :]))
    policy, reference, sampler = tables
    assert policy is not None
    assert reference is not None
    return replace(world, policy=policy, reference=reference, sampler=sampler)


def _with_rewards(world: SmallEnvironment, shape: Shape) -> Iterator[SmallEnvironment]:
    """Nothing pays; only the first choice does."""
    if world.reward is not None:
        nothing = (0.0,) * shape.actions
        rest = (nothing,) * (shape.contexts - 1)
        yield replace(world, reward=(nothing, *rest))
        yield replace(world, reward=((1.0, *nothing[1:]), *rest))


@lru_cache(maxsize=32)
def _near(actions: int, bound: float) -> dict[Probabilities, list[Probabilities]]:
    """For simple probabilities the others whose log-ratio to them stays below a bound."""
    simple = SIMPLE[actions]
    near = {p: [q for q in simple if q != p and np.abs(np.log(np.divide(p, q))).max() < bound] for p in simple}
    return {p: others for p, others in near.items() if others}


def _mild(instance: Instance) -> bool:
    paths = instance.paths
    ratio = np.abs(paths.along(instance.policy - instance.reference)).max()
    return bool(ratio < MILD and np.abs(paths.along(instance.policy - instance.sampler)).max() < MILD_RATIO)
