"""Dynamic programming against the sparse products that it must do, and its growth with the horizon."""

import numpy as np

from benchmarks.environments import loss
from benchmarks.measure import Row, compare, save
from kltest.environments import Instance, mdp, ngram
from kltest.moments import dynamic
from kltest.truth import gradient

STATES, ACTIONS, SUCCESSORS, HORIZON = 100_000, 4, 5, 100


def main() -> list[Row]:
    environment = mdp(STATES, ACTIONS, HORIZON, branches=SUCCESSORS)
    generator = np.random.default_rng(0)
    instance = Instance.of(environment, *generator.standard_normal((3, STATES, ACTIONS)))
    onward, pairs, states = environment.transition, generator.random(STATES * ACTIONS), generator.random(STATES)

    def forwards() -> None:
        for _ in range(HORIZON):
            onward.T @ pairs

    def both_ways() -> None:
        for _ in range(HORIZON):
            onward.T @ pairs
            onward @ states

    case = f"{STATES:,} states, {ACTIONS} actions, {SUCCESSORS} successors, horizon {HORIZON}"
    claim = "dynamic programming / bare sparse products"
    rows = [
        compare(
            claim,
            f"{case}: {name}, {sampler}",
            lambda name=name, sampler=sampler: dynamic(loss(name), instance, sampler),
            products,
            bound=4.0,
            rounds=3,
        )
        for name, products in (("k3-loss", forwards), ("k1-reward-to-go", both_ways))
        for sampler in ("current", "stale")
    ]
    rows += [
        compare(
            claim, f"{case}: truth {name}", lambda name=name: gradient(name, instance), products, bound=4.0, rounds=3
        )
        for name, products in (("local_reverse_kl", forwards), ("reverse_kl", both_ways))
    ]
    rows += [_growth(name) for name in ("k3-loss", "k1-reward-to-go")]
    save("dynamic_programming", rows)
    return rows


def _growth(name: str) -> Row:
    """Ten times the horizon takes ten times as long, and a share that does not grow: 12 leaves room for noise."""
    short, long = (Instance.draw(ngram(3, length, 3), 0) for length in (1_000, 10_000))
    return compare(
        "3-gram, V=3: T=10,000 / T=1,000 (linear: 10)",
        name,
        lambda: dynamic(loss(name), long),
        lambda: dynamic(loss(name), short),
        bound=12.0,
        rounds=5,
    )


if __name__ == "__main__":
    main()
