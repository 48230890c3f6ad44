"""The variance experiment: the pair by hand, recursions by rollouts, the floor, and wrong results called wrong."""

import math

import numpy as np
import pytest
from trial import CHECKOUT, Trial, row_of

from kltest.environments import Instance, sequence
from kltest.truth import gradient

TRIAL = Trial("variance")
lines = CHECKOUT.load("experiments", "records").lines
experiment, analysis = TRIAL.modules("experiment", "claims")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return TRIAL.computed(
        "budgeted=100",
        "reference=0.1,0.25,0.5,0.9",
        "vocabulary=2,8",
        "length=2,6",
        "distance=0.1,3.0",
        "environments=1000",
        "compared=10",
    )


@pytest.mark.scheduled
def test_the_published_pair_by_hand(rows):
    """Rao–Blackwell's value is a constant, and after a 1 also d = 0.98·log 99: variance d²/4."""
    row = row_of(rows, part="pair", reference=0.25)
    d = 0.98 * math.log(99)
    first = {0: math.log(0.5 / 0.25), 1: math.log(0.5 / 0.75)}
    values = [(0.5, first[0]), (0.5 * 0.99, first[1] + math.log(99)), (0.5 * 0.01, first[1] - math.log(99))]
    kl = sum(chance * value for chance, value in values)
    assert row["kl"] == pytest.approx(kl, rel=1e-12)
    assert row["kl"] == pytest.approx((first[0] + first[1]) / 2 + d / 2, rel=1e-12)
    assert row["rao_blackwell"] == pytest.approx(d**2 / 4, rel=1e-12)
    assert row["monte_carlo"] == pytest.approx(sum(p * (value - kl) ** 2 for p, value in values), rel=1e-12)
    assert (round(row["kl"], 5), round(row["monte_carlo"], 5), round(row["rao_blackwell"], 5)) == (
        2.39545,
        3.31591,
        5.06974,
    )


def one_by_one(environments, environment: int, name: str) -> tuple[np.ndarray, float]:
    """Mean and total variance of a gradient, rollout by rollout, each formula written out in logits."""
    policy, reference = environments.tables(environment)
    instance = Instance.of(sequence(policy.shape[1], environments.length), policy, reference)
    p, u = np.exp(policy), policy - reference
    w, kl = np.exp(-u), (p * u).sum(axis=1)
    ahead = exact_ahead(instance, kl)
    each, chances = [], []
    for contexts, tokens in zip(instance.paths.contexts, instance.paths.tokens, strict=True):
        steps = list(zip(contexts, tokens, strict=True))
        total = np.zeros_like(p)
        for at, (c, y) in enumerate(steps):
            g = np.eye(p.shape[1])[y] - p[c]
            slope = p[c] * (u[c] - kl[c])
            k3 = [w[s] - 1 + u[s] for s in steps]
            onward = sum(p[c, v] * ahead[c, v] * (np.eye(p.shape[1])[v] - p[c]) for v in range(p.shape[1]))
            total[c] += {
                "return": g * sum(u[s] for s in steps),
                "to go": g * sum(u[s] for s in steps[at:]),
                "k3 in both": g * sum(k3) + (1 - w[c, y]) * g,
                "k3 in both, to go": g * sum(k3[at:]) + (1 - w[c, y]) * g,
                "rao-blackwell": slope + g * sum(kl[later] for later, _ in steps[at + 1 :]),
                "critic": slope + g * ahead[c, y],
                "bootstrapped": g * (u[c, y] + ahead[c, y]),
                # What is left to chance is which prefixes are visited: no better with gradients at those alone.
                "floor": slope + onward,
            }[name]
        each.append(total)
        chances.append(math.exp(sum(policy[s] for s in steps)))
    mean = sum(chance * one for chance, one in zip(chances, each, strict=True))
    return mean, sum(chance * ((one - mean) ** 2).sum() for chance, one in zip(chances, each, strict=True))


def exact_ahead(instance: Instance, kl: np.ndarray) -> np.ndarray:
    """(C, V) the expected KL of all prefixes that a token leads to."""
    following = instance.environment.successors[:, :, 0]
    ahead = np.zeros(following.shape)
    for _ in range(instance.environment.horizon):
        value = kl + (np.exp(instance.policy) * ahead).sum(axis=1)
        ahead = np.where(following >= 0, value[following], 0.0)
    return ahead


@pytest.fixture(scope="module")
def environments():
    return experiment.Environments.draw(2, 3, 3, 1.0, np.random.default_rng(1), 1.5)


@pytest.mark.parametrize(
    "name", ["return", "to go", "k3 in both", "k3 in both, to go", "rao-blackwell", "critic", "bootstrapped"]
)
def test_recursions_by_rollouts(environments, name):
    forms = {
        "return": lambda: experiment.sampled(environments, credit="return"),
        "to go": lambda: experiment.sampled(environments, credit="to-go"),
        "k3 in both": lambda: experiment.sampled(environments, 1.0, credit="return", both=True),
        "k3 in both, to go": lambda: experiment.sampled(environments, 1.0, credit="to-go", both=True),
        "rao-blackwell": lambda: experiment.rao_blackwell(environments),
        "critic": lambda: experiment.rao_blackwell(environments, critic=True),
        "bootstrapped": lambda: experiment.bootstrapped(environments),
    }
    form = forms[name]()
    for environment in range(2):
        mean, variance = one_by_one(environments, environment, name)
        policy, reference = environments.tables(environment)
        truth = gradient("reverse_kl", Instance.of(sequence(3, 3), policy, reference))
        # Sums of 27 terms of order one.
        np.testing.assert_allclose(mean, truth, atol=1e-13)
        assert environments.noise(form).variance[environment] == pytest.approx(variance, rel=1e-11)
        assert environments.squared_gradient(form)[environment] == pytest.approx((truth**2).sum(), rel=1e-11)


def test_the_floor_is_the_noise_of_knowing_everything_about_a_visited_prefix(environments):
    """It is reached, and it is Σ ‖G‖²/d − ‖G‖² with G the true gradient at a prefix that is visited with chance d."""
    noise = environments.noise(experiment.rao_blackwell(environments))
    for environment in range(2):
        _, variance = one_by_one(environments, environment, "floor")
        assert noise.visits[environment] == pytest.approx(variance, rel=1e-11)
        policy, reference = environments.tables(environment)
        instance = Instance.of(sequence(3, 3), policy, reference)
        truth = gradient("reverse_kl", instance)
        chance = np.zeros(len(policy))
        weights = instance.rollout_weights("current")
        np.add.at(chance, instance.paths.contexts, np.repeat(weights[:, None], 3, axis=1))
        floor = ((truth**2).sum(axis=1) / chance).sum() - (truth**2).sum()
        assert noise.visits[environment] == pytest.approx(floor, rel=1e-11)


@pytest.mark.parametrize("by_prefix", [True, False])
def test_the_best_baseline_is_where_any_other_is_worse(environments, by_prefix):
    from dataclasses import replace

    for form in (experiment.sampled(environments, credit="to-go"), experiment.rao_blackwell(environments)):
        best = environments.with_baseline(form, by_prefix=by_prefix)
        least = environments.noise(best).variance
        assert (least < environments.noise(form).variance).all()
        for step in (-0.01, 0.01):
            moved = replace(best, own=[own + step for own in best.own])
            assert (environments.noise(moved).variance > least).all()
            assert environments.squared_gradient(moved) == pytest.approx(environments.squared_gradient(form), rel=1e-11)


def of_rule(environments, environment: int, exact: dict[int, float]) -> np.ndarray:
    """Variances of value, token-level gradient and gradient rollout by rollout; `exact` is c by context."""
    policy, reference = environments.tables(environment)
    instance = Instance.of(sequence(policy.shape[1], environments.length), policy, reference)
    p, u = np.exp(policy), policy - reference
    kl = (p * u).sum(axis=1)
    chances, found = [], []
    for contexts, tokens in zip(instance.paths.contexts, instance.paths.tokens, strict=True):
        cost = [exact[c] * kl[c] + (1 - exact[c]) * u[c, y] for c, y in zip(contexts, tokens, strict=True)]
        local, whole = np.zeros_like(p), np.zeros_like(p)
        for at, (c, y) in enumerate(zip(contexts, tokens, strict=True)):
            g = np.eye(p.shape[1])[y] - p[c]
            local[c] = exact[c] * p[c] * (u[c] - kl[c]) + (1 - exact[c]) * u[c, y] * g
            whole[c] = local[c] + g * sum(cost[at + 1 :])
        chances.append(math.exp(policy[contexts, tokens].sum()))
        found.append([np.array([sum(cost)]), local.ravel(), whole.ravel()])
    totals = []
    for part in zip(*found, strict=True):
        mean = sum(chance * one for chance, one in zip(chances, part, strict=True))
        totals.append(sum(chance * ((one - mean) ** 2).sum() for chance, one in zip(chances, part, strict=True)))
    return np.array(totals)


@pytest.mark.parametrize("rule", ["nowhere", "everywhere", "random", "threshold"])
def test_variances_are_linear_in_the_rule(environments, rule):
    """By recursion, and by a loop over rollouts with each formula written out."""
    of_value = experiment.gains(environments)["value"]
    generator = np.random.default_rng(3)
    exact = {
        "nowhere": [np.zeros_like(level) for level in of_value],
        "everywhere": [np.ones_like(level) for level in of_value],
        "random": [generator.integers(0, 2, level.shape).astype(float) for level in of_value],
        "threshold": experiment.threshold(of_value),
    }[rule]
    for environment in range(2):
        by_loop = of_rule(environments, environment, dict(enumerate(np.concatenate([c[environment] for c in exact]))))
        assert experiment.predicted(environments, environment, exact) == pytest.approx(by_loop, rel=1e-11)
        if rule == "nowhere":
            _, sampled = environments.value_moments(environments.u)
            assert sampled[environment] == pytest.approx(by_loop[0], rel=1e-11)


def test_the_record_is_consistent():
    """Exact KLs everywhere remove what the two variances differ by; shares of a positive gain grow with the budget."""
    rows = lines(experiment.RECORD)
    seeds = sorted({row["seed"] for row in rows})
    assert seeds == list(range(len(seeds)))
    for seed in seeds:
        mine = [row for row in rows if row["seed"] == seed]
        last = max((row for row in mine if row["what"] == "training"), key=lambda row: row["update"])
        everywhere = row_of(mine, what="value", rule="variance", share=1.0)["removed"]
        # Two estimates from the same rollouts: the covariance is a mean in one of them.
        assert everywhere == pytest.approx(1 - last["exact"] / last["sampled"], abs=0.06)
        assert row_of(mine, what="logits", rule="entropy", share=1.0)["removed"] == 1
        for rule in ("variance", "entropy"):
            shares = [row["removed"] for row in mine if row["what"] == "logits" and row["rule"] == rule]
            assert shares == sorted(shares)
            assert shares[0] > 0


@pytest.mark.scheduled
def test_claims_agree_and_each_can_fail(rows):
    assert TRIAL.agree(rows)
    TRIAL.claims_can_fail(rows)
