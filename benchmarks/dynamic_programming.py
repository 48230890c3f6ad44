"""Dynamic programming against the sparse products that it must do, its memory, and its growth with the horizon."""

from collections.abc import Collection
from functools import partial

import numpy as np

from benchmarks.environments import in_own_process, loss, peak
from benchmarks.measure import Row, compare
from kltest.environments import Instance, mdp, ngram
from kltest.moments import dynamic
from kltest.truth import gradient

ACTIONS, SUCCESSORS = 4, 5
# States, and steps that they are compared in.
FEW, MANY = (100_000, 100), (1_000_000, 30)


def main() -> list[Row]:
    return [
        *_against_products(*FEW),
        *_against_products(*MANY, only=("k1-reward-to-go, current", "truth reverse_kl")),
        *(_memory(*size) for size in (FEW, MANY)),
        *(_growth(name) for name in ("k3-loss", "k1-reward-to-go")),
    ]


def _instance(states: int, horizon: int) -> Instance:
    environment = mdp(states, ACTIONS, horizon, branches=SUCCESSORS)
    return Instance.of(environment, *np.random.default_rng(0).standard_normal((3, states, ACTIONS)))


def _case(states: int, horizon: int) -> str:
    return f"{states:,} states, {ACTIONS} actions, {SUCCESSORS} successors, horizon {horizon}"


def _against_products(states: int, horizon: int, only: Collection[str] = ()) -> list[Row]:
    instance, generator = _instance(states, horizon), np.random.default_rng(1)
    onward, by_token, by_state = (
        instance.environment.transition,
        generator.random(states * ACTIONS),
        generator.random(states),
    )

    def forwards() -> None:
        for _ in range(horizon):
            onward.T @ by_token

    def both_ways() -> None:
        for _ in range(horizon):
            onward.T @ by_token
            onward @ by_state

    timed = [
        (f"{name}, {sampler}", partial(dynamic, loss(name), instance, sampler), products)
        for name, products in (("k3-loss", forwards), ("k1-reward-to-go", both_ways))
        for sampler in ("current", "stale")
    ]
    timed += [
        (f"truth {name}", partial(gradient, name, instance), products)
        for name, products in (("local_reverse_kl", forwards), ("reverse_kl", both_ways))
    ]
    claim = "dynamic programming / bare sparse products"
    return [
        compare(claim, f"{_case(states, horizon)}: {what}", ours, products, bound=4.0, floor=1.0, rounds=2)
        for what, ours, products in timed
        if not only or what in only
    ]


def _memory(states: int, horizon: int) -> Row:
    """In bytes of the transition's non-zeros, number and column; up to 256 MB of forward states are among it."""
    ratio = in_own_process(peak_memory, states, horizon)
    case = f"{_case(states, horizon)}: k1-reward-to-go"
    claim = "peak memory of dynamic programming / non-zeros"
    return Row(claim, case, ratio, ratio, ratio, None, True, None, 0.0, 0.0)


def peak_memory(states: int, horizon: int) -> float:
    instance = _instance(states, horizon)
    taken, transition = loss("k1-reward-to-go"), instance.environment.transition
    return peak(lambda: dynamic(taken, instance)) / (transition.data.nbytes + transition.indices.nbytes)


def _growth(name: str) -> Row:
    """Ten times the horizon takes ten times as long, and a share that does not grow: 12 leaves room for noise."""
    short, long = (Instance.draw(ngram(3, length, 3), 0) for length in (10_000, 100_000))
    return compare(
        "3-gram, V=3: T=100,000 / T=10,000",
        name,
        partial(dynamic, loss(name), long),
        partial(dynamic, loss(name), short),
        bound=12.0,
        floor=10.0,
        rounds=2,
    )
