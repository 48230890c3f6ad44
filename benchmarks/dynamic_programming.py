"""Dynamic programming against the sparse products that it must do, its memory, and its growth with the horizon."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.environments import loss
from benchmarks.measure import Row, compare, memory, peak
from kltest.environments import Instance, mdp, ngram
from kltest.moments import dynamic
from kltest.truth import gradient

ACTIONS, SUCCESSORS = 4, 5
# States, and steps that they are compared in.
FEW, MANY = (100_000, 100), (1_000_000, 30)
# Estimators that are compared, and True if their products go both ways; for many states the slowest alone.
LOSSES = {"k3-loss": False, "k1-reward-to-go": True}
TRUTHS = {"local_reverse_kl": False, "reverse_kl": True}
SLOWEST = ("k1-reward-to-go, current", "truth reverse_kl")


def main() -> list[Row]:
    """Return the rows of the table of ratios."""
    claim = "peak memory of dynamic programming / non-zeros"
    return [
        *_against_products(*FEW),
        *_against_products(*MANY, few=True),
        *(memory(claim, f"{_case(*size)}: k1-reward-to-go", peak_memory, *size, bound=None) for size in (FEW, MANY)),
        *map(_growth, LOSSES),
    ]


def _instance(states: int, horizon: int) -> Instance:
    environment = mdp(states, ACTIONS, horizon, branches=SUCCESSORS)
    return Instance.of(environment, *np.random.default_rng(0).standard_normal((3, states, ACTIONS)))


def _case(states: int, horizon: int) -> str:
    return f"{states:,} states, {ACTIONS} actions, {SUCCESSORS} successors, horizon {horizon}"


def _against_products(states: int, horizon: int, *, few: bool = False) -> list[Row]:
    instance, generator = _instance(states, horizon), np.random.default_rng(1)
    onward = instance.environment.transition
    by_token, by_state = generator.random(states * ACTIONS), generator.random(states)

    def products(both_ways: bool) -> None:
        for _ in range(horizon):
            onward.T @ by_token
            if both_ways:
                onward @ by_state

    timed = {
        f"{name}, {sampler}": (partial(dynamic, loss(name), instance, sampler), both_ways)
        for name, both_ways in LOSSES.items()
        for sampler in ("current", "stale")
    }
    timed |= {f"truth {name}": (partial(gradient, name, instance), both_ways) for name, both_ways in TRUTHS.items()}
    claim, options = "dynamic programming / bare sparse products", {"bound": 4.0, "floor": 1.0, "rounds": 2}
    return [
        compare(claim, f"{_case(states, horizon)}: {what}", ours, partial(products, both_ways), **options)
        for what, (ours, both_ways) in timed.items()
        if not few or what in SLOWEST
    ]


def peak_memory(states: int, horizon: int) -> Iterator[tuple[int, int]]:
    """Bytes: at the peak, up to 256 MB of forward states among them; and of the non-zeros, number and column."""
    instance = _instance(states, horizon)
    taken, transition = loss("k1-reward-to-go"), instance.environment.transition
    yield peak(lambda: dynamic(taken, instance)), transition.data.nbytes + transition.indices.nbytes


def _growth(name: str) -> Row:
    """Ten times the horizon takes ten times as long, and a share that does not grow: 12 leaves room for noise."""
    short, long = (partial(dynamic, loss(name), Instance.draw(ngram(3, T, 3), 0)) for T in (10_000, 100_000))
    return compare("3-gram, V=3: T=100,000 / T=10,000", name, long, short, bound=12.0, floor=10.0, rounds=2)
