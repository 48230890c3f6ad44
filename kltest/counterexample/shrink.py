"""Search for the smallest environment in which a loss fails, with numbers so simple that they can be redone on paper.

Environments are tried smallest first (tokens, actions, fixed or varying length, sampler, size of the batch). Each is
filled with unrelated simple probabilities, so that no gradients are equal by chance. In the first that fails, one
context after the other is given the simplest probabilities with which the loss still fails: uniform and equal to the
reference, equal to the reference, one of the two uniform. The search is bounded by calls of the loss, not by seconds,
so that a rerun finds the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from kltest.counterexample.environment import (
    SmallEnvironment,
    adds_up,
    at_once,
    counter_example,
    differs,
    kind,
    measure,
)
from kltest.counterexample.program import with_program
from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.findings import Findings, Row
from kltest.moments.tolerances import TOLERANCES
from kltest.report import CounterExample
from kltest.truth import combine

Probabilities = tuple[float, ...]
Rows = tuple[Probabilities, Probabilities, Probabilities | None]

# By number of actions: the uniform distribution, or nearly, then others. Short decimals, to be copied as printed.
SIMPLE: dict[int, tuple[Probabilities, ...]] = {
    2: ((0.5, 0.5), (0.8, 0.2), (0.25, 0.75), (0.9, 0.1), (0.6, 0.4), (0.2, 0.8), (0.75, 0.25)),
    3: ((0.25, 0.25, 0.5), (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.4, 0.4, 0.2), (0.2, 0.4, 0.4), (0.6, 0.2, 0.2)),
    4: ((0.25,) * 4, (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4), (0.4, 0.2, 0.2, 0.2), (0.2, 0.2, 0.2, 0.4)),
}
# Tokens and actions.
SIZES = ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2), (3, 3))
# Bounds of |log π/ref| and |log π/sampler| along a rollout. They are those of grading, so that a loss fails here for
# the reason for which it failed there.
MILD, MILD_RATIO = 2.0, 1.0
# Bounds of the search: calls of the loss, and batches to enumerate in one environment.
MOST_CALLS, MOST_BATCHES = 600, 100
# Samplers of small environments.
SMALL = ("current", "stale")
# Smallest relative difference that counts as a failure: it shows in six decimals.
VISIBLE = 1e-3
GIVES_REWARDS = frozenset({"reward", "advantage", "group", "rollout"})


def smallest_failure(findings: Findings) -> CounterExample | None:
    """Return the smallest environment in which the first exact row that refutes still disagrees, None if none does.

    A row whose disagreement was expected does not refute, and its kind of environment is left out.
    """
    rows = (row for row in findings.rows if row.refutes and row.method == "exact")
    row = next((row for row in rows if row.sampler in SMALL), None)
    return None if row is None else Shrinking(findings, row).smallest()


def example(findings: Findings) -> CounterExample | None:
    """Return a small environment in which the loss follows the declared gradient, None if it does not there."""
    loss, sampler = findings.loss, findings.samplers[-1]
    if sampler not in SMALL:
        return None
    length = 1 if set(findings.environments) <= {"bandit"} else 2
    whole = max((row.batch for row in findings.rows), default=1)
    for tokens, batch in ((length, 2), (1, whole)) if findings.observed.coupled else ((length, 1),):
        rewarded = bool(loss.takes & GIVES_REWARDS)
        environment = unrelated(tokens, 2, moved=sampler == "stale", rewarded=rewarded)
        with suppress(KltestError):
            summed = adds_up(loss, environment, sampler, batch)
            answer = counter_example(loss, findings.expect, environment, sampler, batch, 0.0, summed=summed)
            if not answer.differs:
                return answer.example
    return None


class Shrinking:
    """Search for the smallest environment in which a row still fails; `calls` counts the calls of the loss."""

    def __init__(self, findings: Findings, row: Row) -> None:
        self.findings, self.row, self.calls = findings, row, 0
        # Relative bias above which an environment still fails.
        self.limit = min(VISIBLE, row.relative_bias / 10)
        self._summed: dict[int, bool] = {}
        self._failing: dict[tuple[SmallEnvironment, int], bool] = {}

    def smallest(self) -> CounterExample | None:
        """Return the counter-example with its program, None if no environment that is tried fails."""
        loss, expect, sampler = self.findings.loss, self.findings.expect, self.row.sampler
        for environment, batch in self.candidates():
            if not self.fails(environment, batch):
                continue
            environment = self.simplified(environment, batch)
            with suppress(KltestError):
                summed = self._adds_up(environment, batch)
                answer = counter_example(loss, expect, environment, sampler, batch, self.limit, summed=summed)
                if answer.differs:
                    return with_program(loss, expect, environment, answer.example, answer.dtype)
            return None
        return None

    def candidates(self) -> Iterator[tuple[SmallEnvironment, int]]:
        """Environments and batches to try, smallest first, without the kinds in which the gradient agreed."""
        batches = sorted({2, self.row.batch}) if self.row.batch > 1 else [1]
        samplers = (False, True) if self.row.sampler == "stale" else (False,)
        rewarded = bool(self.findings.loss.takes & GIVES_REWARDS)
        for (length, actions), ends, moved, batch, variant in product(
            SIZES, (False, True), samplers, batches, range(2)
        ):
            if (ends and length == 1) or self._agreed(kind(length, ends), "stale" if moved else "current"):
                continue
            environment = unrelated(length, actions, ends=ends, moved=moved, rewarded=rewarded, variant=variant)
            if batch == 1 or len(environment.instance().paths) ** batch <= MOST_BATCHES:
                yield environment, batch

    def _agreed(self, environment: str, sampler: str) -> bool:
        same = [row for row in self.findings.rows if (row.environment, row.sampler) == (environment, sampler)]
        return bool(same) and not any(row.refutes or row.agrees is None for row in same)

    def fails(self, environment: SmallEnvironment, batch: int) -> bool:
        """True if the expected gradient visibly differs from the declared one."""
        if (environment, batch) not in self._failing:
            self._failing[environment, batch] = False
            with suppress(KltestError):
                self._failing[environment, batch] = self.calls <= MOST_CALLS and self._fails(environment, batch)
        return self._failing[environment, batch]

    def _fails(self, environment: SmallEnvironment, batch: int) -> bool:
        instance, loss, sampler = environment.instance(), self.findings.loss, self.row.sampler
        if not _mild(instance):
            return False
        if batch == 1 and not self.findings.observed.coupled:
            self.calls += 1
            found, called = at_once(loss, instance, sampler, summed=self.findings.observed.reduction == "sum")
        else:
            self.calls += len(instance.paths) ** batch
            found, _, called = measure(loss, instance, sampler, batch, summed=self._adds_up(environment, batch))
        target = combine(self.findings.expect, instance)
        return differs(found, target, instance, max(TOLERANCES[called.dtype].gradient, self.limit))

    def _adds_up(self, environment: SmallEnvironment, batch: int) -> bool:
        """Tried once for each size, in the first environment: no gradients are equal by chance there."""
        if batch not in self._summed:
            self._summed[batch] = adds_up(self.findings.loss, environment, self.row.sampler, batch)
        return self._summed[batch]

    def simplified(self, environment: SmallEnvironment, batch: int) -> SmallEnvironment:
        """Give each context, the last first, the simplest probabilities with which the loss fails, repeatedly."""
        options = list(_options(len(environment.policy[0]), moved=environment.sampler is not None))
        before = None
        while environment != before:
            before = environment
            for context in reversed(range(len(environment.policy))):
                simpler = (_with_rows(environment, context, rows) for rows in options)
                environment = self._first(environment, simpler, batch)
            environment = self._first(environment, _with_rewards(environment), batch)
        return environment

    def _first(self, present: SmallEnvironment, simpler: Iterable[SmallEnvironment], batch: int) -> SmallEnvironment:
        """The first that fails of environments in order of simplicity; those after the present one are not simpler."""
        return next((other for other in simpler if other == present or self.fails(other, batch)), present)


def unrelated(
    length: int, actions: int, *, ends: bool = False, moved: bool = False, rewarded: bool = False, variant: int = 0
) -> SmallEnvironment:
    """Return an environment with simple unrelated probabilities: whatever can differ in it does.

    If `moved`, the sampler is another policy than the graded one.
    """
    near, ratios = _near(actions, MILD / length), _near(actions, MILD_RATIO / length)
    generator = np.random.default_rng([variant, length, actions, ends])
    contexts = range(sum((actions - ends) ** depth for depth in range(length)))

    def one_of(choices: list[Probabilities]) -> Probabilities:
        return choices[generator.integers(len(choices))]

    policy = tuple(one_of([p for p in near if p in ratios or not moved]) for _ in contexts)
    return SmallEnvironment(
        policy=policy,
        reference=tuple(one_of(near[p]) for p in policy),
        sampler=tuple(one_of(ratios[p]) for p in policy) if moved else None,
        length=length,
        ends=ends,
        reward=tuple(tuple(float(c % actions == a) for a in range(actions)) for c in contexts) if rewarded else None,
    )


def _options(actions: int, *, moved: bool) -> Iterator[Rows]:
    """(policy, reference, sampler) of one context, the simplest first."""
    uniform, *others = SIMPLE[actions]
    pairs = [(one, one) for one in (uniform, *others[:2])]
    pairs += [(other, uniform) for other in others] + [(uniform, other) for other in others]
    yield from ((policy, reference, policy if moved else None) for policy, reference in pairs)
    if moved:
        samplers = (uniform, *others[:3])
        yield from ((policy, reference, mu) for policy, reference in pairs for mu in samplers if mu != policy)


def _with_rows(environment: SmallEnvironment, context: int, rows: Rows) -> SmallEnvironment:
    tables: dict[str, Any] = {
        name: row and (*getattr(environment, name)[:context], row, *getattr(environment, name)[context + 1 :])
        for name, row in zip(("policy", "reference", "sampler"), rows, strict=True)
    }
    return replace(environment, **tables)


def _with_rewards(environment: SmallEnvironment) -> Iterator[SmallEnvironment]:
    """Environments without rewards, then with a reward for the first choice only."""
    if environment.reward is not None:
        first, *rest = ((0.0,) * len(row) for row in environment.reward)
        yield replace(environment, reward=(first, *rest))
        yield replace(environment, reward=((1.0, *first[1:]), *rest))


@lru_cache(maxsize=32)
def _near(actions: int, bound: float) -> dict[Probabilities, list[Probabilities]]:
    """Return for each simple distribution the others whose log-ratios to it stay below a bound."""
    simple = SIMPLE[actions]
    near = {p: [q for q in simple if q != p and np.abs(np.log(np.divide(p, q))).max() < bound] for p in simple}
    return {p: others for p, others in near.items() if others}


def _mild(instance: Instance) -> bool:
    paths = instance.paths
    ratio = np.abs(paths.along(instance.policy - instance.reference)).max()
    return bool(ratio < MILD and np.abs(paths.along(instance.policy - instance.sampler)).max() < MILD_RATIO)
