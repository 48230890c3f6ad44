"""What the fixed point of a token-level term lacks: by recursion, by the values themselves, and rollout by rollout."""

from dataclasses import replace

import numpy as np
import pytest
from enumerated import value_again
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.special import logsumexp
from tabular_environments import SHARED, TREES, placed, reference_of
from weekly import spread

from kltest.environments import END, mdp, ragged, sequence, tabular
from kltest.truth import gradient, optimum, token_level, token_level_fixed_point, token_level_gap

BETAS = (0.1, 0.5, 3.0)
DETERMINISTIC = [*TREES, "ngram", "ngram-ragged"]
# Values are sums of terms of size max(1, β) that cancel.
EXACT = 1e-12


def environment_of(label):
    return {**TREES, **SHARED}[label]


def at_fixed_point(environment, reference, beta):
    return placed(environment, token_level_fixed_point(environment, reference, beta), reference)


def gap_of_values(environment, reference, beta):
    """J* − J(π̂), from the soft optimum, and from E[R] and the KL as sums over all rollouts."""
    instance = at_fixed_point(environment, reference, beta)
    objective = value_again("expected_reward", instance) - beta * value_again("kl", instance)
    return optimum(environment, reference, beta).value - objective


def rollouts_of(instance):
    """Chance, prompt, K, return and log-ratio (N,) of each rollout: its next-token KLs are read off along it."""
    paths, policy, reference = instance.paths, instance.policy, instance.reference
    kl = (np.exp(policy) * (policy - reference)).sum(axis=1, keepdims=True)
    chances = np.exp(paths.log_probability(policy))
    along = (paths.along(one) for one in (np.broadcast_to(kl, policy.shape), instance.environment.reward))
    return chances, paths.prompt, *along, paths.along(policy - reference)


def by_prompt(chances, prompt, statistic):
    """Mean over prompts of a statistic of the rollouts (their chances and indices) of each."""
    found = 0.0
    for one in np.unique(prompt):
        rows = np.flatnonzero(prompt == one)
        weight = chances[rows].sum()
        found += weight * statistic(chances[rows] / weight, rows)
    return found


def cumulant(chances, values):
    """E[K] + log E[e^{−K}]."""
    return chances @ values + logsumexp(-values, b=chances)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("label", spread(3, [*TREES, *SHARED]))
def test_the_gap_is_that_of_the_values(label, beta):
    environment = environment_of(label)
    reference = reference_of(environment)
    found, instance = token_level_gap(environment, reference, beta), at_fixed_point(environment, reference, beta)
    assert found.objective == pytest.approx(gap_of_values(environment, reference, beta), abs=EXACT * max(1, beta))
    assert found.kl == pytest.approx(value_again("kl", instance), rel=EXACT, abs=EXACT)
    assert found.reward == pytest.approx(value_again("expected_reward", instance), rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("label", spread(3, DETERMINISTIC))
def test_the_gap_is_the_cumulant_excess_of_next_token_kls_along_rollouts(label, beta):
    environment = environment_of(label)
    reference = reference_of(environment)
    found, instance = token_level_gap(environment, reference, beta), at_fixed_point(environment, reference, beta)
    chances, prompt, summed, returns, u = rollouts_of(instance)
    excess = by_prompt(chances, prompt, lambda chance, rows: cumulant(chance, summed[rows]))
    assert found.objective == pytest.approx(beta * excess, abs=EXACT * max(1, beta))
    assert found.pooled == pytest.approx(found.objective, abs=EXACT)
    spread = by_prompt(chances, prompt, lambda chance, rows: chance @ (summed[rows] - chance @ summed[rows]) ** 2)
    assert found.variance == pytest.approx(spread, rel=1e-11, abs=1e-15)
    # log π̂/ref = K + (R − E R)/β, rollout by rollout.
    for one in np.unique(prompt):
        rows = prompt == one
        mean = chances[rows] @ returns[rows] / chances[rows].sum()
        assert_allclose(u[rows], summed[rows] + (returns[rows] - mean) / beta, rtol=0, atol=1e-12 * max(1, 1 / beta))


@pytest.mark.parametrize("label", ["sequences", "ragged", "mdp"])
def test_a_planted_error_is_seen(label, monkeypatch):
    """The sign of δ, a coefficient that is off by a thousandth, and one logarithm over all prompts."""
    environment, beta = environment_of(label), 0.5
    reference = reference_of(environment)
    right = gap_of_values(environment, reference, beta)
    assert token_level_gap(environment, reference, beta * 1.001).objective != pytest.approx(right, rel=1e-6)
    if label == "sequences":
        chances, _, summed, *_ = rollouts_of(at_fixed_point(environment, reference, beta))
        assert beta * cumulant(chances, summed) != pytest.approx(right, rel=1e-3)
    steps_of = token_level._steps

    def wrong(*arguments):
        steps, *rest = steps_of(*arguments)
        return [replace(step, innovation=-step.innovation) for step in steps], *rest

    monkeypatch.setattr(token_level, "_steps", wrong)
    assert token_level_gap(environment, reference, beta).objective != pytest.approx(right, rel=1e-5)


def frontier_again(environment, reference, kl):
    """The most reward at a KL, by bisection for the optimum that has it; rewards and KLs by enumeration."""

    def measured(coefficient):
        instance = placed(environment, optimum(environment, reference, coefficient).policy, reference)
        return value_again("kl", instance), value_again("expected_reward", instance)

    low, high = 1e-2, 1e3
    for _ in range(60):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if measured(middle)[0] > kl else (low, middle)
    return measured(low)[1]


@pytest.mark.parametrize("label", ["sequence", "ragged", "mdp", "ngram-ragged"])
def test_at_the_same_kl_no_policy_earns_more_than_stated(label):
    environment, beta = environment_of(label), 0.5
    reference = reference_of(environment)
    found = token_level_gap(environment, reference, beta)
    assert found.at_same_kl == pytest.approx(frontier_again(environment, reference, found.kl) - found.reward, abs=1e-10)
    assert 0 < found.at_same_kl < found.objective


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
coefficients = st.floats(0.05, 50.0)


def drawn(vocabulary, length, seed, *, ends):
    generator = np.random.default_rng(seed)
    prompts = generator.dirichlet(np.ones(generator.integers(1, 4)))
    empty = (ragged if ends and vocabulary > 1 else sequence)(vocabulary, length, prompts=prompts)
    environment = replace(empty, reward=generator.standard_normal(empty.reward.shape))
    return environment, generator.standard_normal(environment.reward.shape)


@settings(max_examples=40, deadline=None)
@given(size=sizes, beta=coefficients, ends=st.booleans())
def test_in_any_token_tree_both_routes_agree_and_the_bounds_hold(size, beta, ends):
    environment, reference = drawn(*size, ends=ends)
    found = token_level_gap(environment, reference, beta)
    rounding = EXACT * max(1, beta)
    assert found.objective == pytest.approx(gap_of_values(environment, reference, beta), abs=10 * rounding)
    chances, prompt, summed, *_ = rollouts_of(at_fixed_point(environment, reference, beta))
    excess = by_prompt(chances, prompt, lambda chance, rows: cumulant(chance, summed[rows]))
    assert found.objective == pytest.approx(beta * excess, abs=10 * rounding)
    assert -rounding <= found.at_same_kl <= found.objective + rounding
    for bound in (found.bennett, found.hoeffding):
        assert found.objective <= bound + rounding


@settings(max_examples=40, deadline=None)
@given(
    states=st.integers(2, 4),
    actions=st.integers(2, 3),
    horizon=st.integers(1, 4),
    seed=st.integers(0, 999),
    beta=coefficients,
)
def test_with_random_dynamics_the_formula_is_an_upper_bound(states, actions, horizon, seed, beta):
    environment = mdp(states, actions, horizon, seed=seed)
    reference = reference_of(environment)
    found, rounding = token_level_gap(environment, reference, beta), EXACT * max(1, beta)
    assert found.objective == pytest.approx(gap_of_values(environment, reference, beta), abs=10 * rounding)
    assert found.objective <= found.pooled + rounding
    for bound in (found.bennett, found.hoeffding):
        assert found.pooled <= bound + rounding
    if horizon <= 2:  # nothing is lacking from the last step on, whichever state it is in
        assert found.pooled == pytest.approx(found.objective, abs=rounding)


def test_with_random_dynamics_it_is_strict_where_chance_decides_what_is_lacking():
    """One token, then chance decides between a context in which π̂ lacks something and one in which it lacks nothing."""
    beta, end = 0.5, (END, END)
    # 0 → 1 or 2 by chance; 1 → 3 or 4 by its token, 2 → 3; 3 and 4 are paid differently, and end.
    successors = np.array([[(1, 2), (1, 2)], [(3, END), (4, END)], [(3, END), (3, END)], [end, end], [end, end]])
    chances = np.where(np.arange(2) == 0, 1.0, np.zeros((5, 2, 2)))
    chances[0] = 0.5
    successors[3:, :, 1] = 0  # listed, never reached
    reward = np.array([[0.0, 0.0], [0.3, -0.4], [0.0, 0.0], [1.0, -1.0], [0.2, 0.0]])
    environment = tabular(successors, chances, reward, 3, start=np.eye(5)[0])
    found = token_level_gap(environment, np.zeros((5, 2)), beta)
    assert found.objective == pytest.approx(gap_of_values(environment, np.zeros((5, 2)), beta), abs=EXACT)
    # Both tokens of 0 do the same: half of what is lacking in context 1, and log of the mean of its exponential.
    alone = token_level_gap(replace(environment, start=np.array([1])), np.zeros((5, 2)), beta).objective
    assert found.objective == pytest.approx(alone / 2, rel=1e-12)
    assert found.pooled == pytest.approx(beta * np.log((1 + np.exp(alone / beta)) / 2), rel=1e-12)
    assert found.pooled > found.objective * (1 + 1e-6)


def test_nothing_is_lacking_if_and_only_if_the_kl_to_go_does_not_depend_on_the_token():
    """Context-free rewards and reference: K is constant, Σu is not, and no part of the gradient is missing."""
    environment = sequence(3, 3)
    environment = replace(environment, reward=np.broadcast_to([1.0, 0.0, -0.5], environment.reward.shape).copy())
    reference = np.broadcast_to([0.2, 0.0, 0.5], environment.reward.shape)
    found = token_level_gap(environment, reference, 0.3)
    instance = at_fixed_point(environment, reference, 0.3)
    assert found.objective == pytest.approx(0.0, abs=1e-15)
    assert found.share == pytest.approx(0.0, abs=1e-7)
    assert np.abs(gradient("future_reverse_kl", instance)).max() < 1e-15
    assert token_level_gap(environment, reference_of(environment), 0.3).objective > 1e-3


@pytest.mark.parametrize("label", ["sequence", "sequences", "ragged"])
def test_the_missed_part_of_the_gradient_is_the_innovation_of_the_kl_to_go(label):
    """In the metric of the inverse Fisher information, d(s)·(diag π − ππᵀ), its squared norm is Var K."""
    environment, beta = environment_of(label), 0.5
    reference = reference_of(environment)
    instance = at_fixed_point(environment, reference, beta)
    found = token_level_gap(environment, reference, beta)
    chances = np.exp(instance.policy)
    visits = np.zeros(len(chances))
    paths = instance.paths
    weights = np.exp(paths.log_probability(instance.policy))
    np.add.at(visits, paths.contexts[paths.mask], np.broadcast_to(weights[:, None], paths.mask.shape)[paths.mask])
    # Every context is a token prefix, in no rollout more than once.
    squares = {
        name: ((gradient(name, instance) / chances) ** 2 * chances / visits[:, None]).sum()
        for name in ("future_reverse_kl", "reverse_kl")
    }
    assert squares["future_reverse_kl"] == pytest.approx(found.variance, rel=1e-11)
    assert found.share == pytest.approx(np.sqrt(squares["future_reverse_kl"] / squares["reverse_kl"]), rel=1e-11)


def test_for_small_rewards_the_gap_is_half_the_variance_and_at_the_same_kl_what_the_return_leaves_of_it():
    environment = environment_of("ragged")
    reference = reference_of(environment)
    found = token_level_gap(environment, reference, 300.0)
    # Third cumulants are of the order of reward/β beside the second.
    assert found.objective == pytest.approx(found.second_order, rel=0.02)
    assert found.at_same_kl == pytest.approx(found.second_order * (1 - found.correlation**2), rel=0.02)
    assert found.bennett == pytest.approx(found.second_order, rel=0.02)


def test_bennetts_bound_is_close_where_beta_is_large_beside_rewards():
    environment = environment_of("sequence")
    found = token_level_gap(environment, reference_of(environment), 10.0)
    assert found.objective <= found.bennett <= 1.1 * found.objective
