"""The regularised optimum and the estimators' fixed points, each against its closed form and by its own gradient."""

import numpy as np
import pytest
from enumerated import value_again
from fixed_points import sequence_k3_fixed_point, token_k2_fixed_point, token_k3_fixed_point

from kltest.environments import END, Environment, Instance, bandit, mdp, ngram, ragged, sequence
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.truth import gradient_again, optimum, value

BETAS = (0.05, 0.5, 10.0)


def paid(make, *arguments, **options):
    shape = make(*arguments, **options).reward.shape
    return make(*arguments, **options, reward=np.random.default_rng(9).standard_normal(shape))


TREES = {
    "bandit": paid(bandit, 4),
    "bandits": paid(bandit, 3, prompts=np.array([0.3, 0.7])),
    "sequence": paid(sequence, 3, 3),
    "sequences": paid(sequence, 2, 3, prompts=np.array([0.25, 0.75])),
    "ragged": paid(ragged, 3, 4),
}
SHARED = {"mdp": mdp(4, 2, 3, seed=2), "ngram": paid(ngram, 2, 4, 2), "ngram-ragged": paid(ngram, 3, 3, 2, end_token=1)}


def unrolled(environment):
    """The same environment with a context of its own for every time step: context t·C + c."""
    steps, contexts = environment.horizon, environment.n_contexts
    successors = [
        np.where(environment.successors == END, END, environment.successors + (step + 1) * contexts)
        for step in range(steps)
    ]
    successors[-1] = np.full_like(environment.successors, END)
    surely = np.broadcast_to(np.eye(1, environment.branches), environment.probabilities.shape)
    probabilities = [environment.probabilities] * (steps - 1) + [surely]
    return Environment(
        name="unrolled",
        horizon=steps,
        start=environment.start,
        prompts=environment.prompts,
        successors=np.concatenate(successors),
        probabilities=np.concatenate(probabilities),
        reward=np.tile(environment.reward, (steps, 1)),
        tree=True,
    )


def reference_of(environment):
    return np.random.default_rng(4).standard_normal(environment.reward.shape)


def placed(environment, policy, reference):
    """An instance in which a policy that depends on time is a table."""
    if policy.ndim == 2:
        return Instance.of(environment, policy, reference)
    steps = environment.horizon
    return Instance.of(unrolled(environment), policy.reshape(-1, policy.shape[-1]), np.tile(reference, (steps, 1)))


def force(instance, beta, name):
    """max |∇E[R] − β·∇KL-like| by autograd."""
    return np.abs(gradient_again("expected_reward", instance) - beta * gradient_again(name, instance)).max()


# Forces are sums of terms of size max(1, β) that cancel; fixed points are solved to 1e-15.
STILL = 1e-13

FIXED_POINTS = {
    "reverse_kl": lambda environment, reference, beta: optimum(environment, reference, beta).policy,
    "local_reverse_kl": token_k2_fixed_point,
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


@pytest.mark.parametrize("solve", FIXED_POINTS.values())
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
