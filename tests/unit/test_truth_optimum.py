"""The regularised optimum and the estimators' fixed points, each against its closed form and by its own gradient."""

import numpy as np
import pytest
from enumerated import value_again
from fixed_points import sequence_k3_fixed_point, token_k3_fixed_point
from tabular_environments import SHARED, TREES, placed, reference_of

from kltest.environments import Instance
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.truth import gradient_again, optimum, token_level_fixed_point, token_level_gap, value

BETAS = (0.05, 0.5, 10.0)


def force(instance, beta, name):
    """max |∇E[R] − β·∇KL-like| by autograd."""
    return np.abs(gradient_again("expected_reward", instance) - beta * gradient_again(name, instance)).max()


# Forces are sums of terms of size max(1, β) that cancel; fixed points are solved to 1e-15.
STILL = 1e-13

FIXED_POINTS = {
    "reverse_kl": lambda environment, reference, beta: optimum(environment, reference, beta).policy,
    "local_reverse_kl": token_level_fixed_point,
    "local_forward_kl": token_k3_fixed_point,
    "forward_kl": sequence_k3_fixed_point,  # a policy in trees only
}
SOLVED = [(label, name) for name in FIXED_POINTS for label in (TREES if name == "forward_kl" else {**TREES, **SHARED})]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("label", "name"), SOLVED)
def test_the_expected_gradient_vanishes_at_the_fixed_point(label, name, beta):
    environment = {**TREES, **SHARED}[label]
    reference = reference_of(environment)
    policy = FIXED_POINTS[name](environment, reference, beta)
    assert policy.shape == (environment.reward.shape if environment.tree else (environment.horizon, *reference.shape))
    assert force(placed(environment, policy, reference), beta, name) < STILL * max(1, beta)


@pytest.mark.parametrize("name", ["local_reverse_kl", "local_forward_kl"])
def test_fixed_points_are_not_the_optimum(name):
    """And the test above can fail: the optimum of one is no rest for the other."""
    environment = TREES["sequence"]
    reference = reference_of(environment)
    policy = FIXED_POINTS[name](environment, reference, 0.5)
    assert force(Instance.of(environment, policy, reference), 0.5, "reverse_kl") > 1e-3
    assert value("kl", Instance.of(environment, policy, optimum(environment, reference, 0.5).policy)) > 1e-3


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("label", [*TREES, *SHARED])
def test_the_optimal_value_is_the_objective_there(label, beta):
    environment = {**TREES, **SHARED}[label]
    reference = reference_of(environment)
    best = optimum(environment, reference, beta)
    instance = placed(environment, best.policy, reference)
    objective = value_again("expected_reward", instance) - beta * value_again("kl", instance)
    assert best.value == pytest.approx(objective, rel=1e-12, abs=1e-13)
    # By concavity in the distribution over rollouts, any other policy is worse by β·KL(π‖π*): here in every tree.
    if environment.tree:
        other = Instance.of(environment, np.random.default_rng(5).standard_normal(reference.shape), reference)
        gap = value("kl", Instance.of(environment, other.policy, best.policy))
        theirs = value("expected_reward", other) - beta * value("kl", other)
        assert theirs == pytest.approx(best.value - beta * gap, rel=1e-11)


@pytest.mark.parametrize("solve", [*FIXED_POINTS.values(), token_level_gap])
def test_bad_input_is_refused(solve):
    environment = TREES["bandit"]
    for beta in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="β"):
            solve(environment, np.zeros((1, 4)), beta)
    with pytest.raises(InvalidEnvironmentError, match="shape"):
        solve(environment, np.zeros((1, 3)), 1.0)


@pytest.mark.parametrize("environment", SHARED)
def test_whole_rollouts_are_no_policy_where_contexts_are_shared(environment):
    with pytest.raises(InvalidEnvironmentError, match="shared"):
        sequence_k3_fixed_point(SHARED[environment], reference_of(SHARED[environment]), 1.0)
