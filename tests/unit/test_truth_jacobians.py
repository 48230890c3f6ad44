"""Jacobians of the named gradients, against central differences of the gradients themselves."""

import dataclasses

import numpy as np
import pytest
from jacobians import asymmetry, jacobian

from kltest.environments import Instance, mdp, ngram, ragged, sequence
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.truth import gradient

ENVIRONMENTS = (sequence(2, 3), ragged(3, 3), ngram(2, 5, 2), ngram(2, 4, 3, end_token=1), mdp(horizon=4))
NAMES = ("reverse_kl", "local_reverse_kl", "expected_reward")


def label(environment):
    return f"{environment.name}-{environment.horizon}"


def drawn(environment, seed=3):
    reward = np.random.default_rng(seed).standard_normal((environment.n_contexts, environment.vocabulary))
    return Instance.draw(dataclasses.replace(environment, reward=reward), seed, distance=4.0)


# The last one cannot be enumerated.
@pytest.mark.parametrize("environment", [*ENVIRONMENTS, ngram(3, 400, 2)], ids=label)
@pytest.mark.parametrize("name", NAMES)
def test_it_says_how_the_gradient_moves(name, environment):
    """A directional difference; central, so that its error is of the order of step²."""
    instance = drawn(environment)
    direction, step = np.random.default_rng(0).standard_normal(instance.policy.shape), 1e-5
    moved = [instance.policy + sign * step * direction for sign in (1, -1)]
    ends = [gradient(name, Instance.of(instance.environment, policy, instance.reference)) for policy in moved]
    found = jacobian(name, instance) @ direction.ravel()
    assert np.abs(found - (ends[0] - ends[1]).ravel() / (2 * step)).max() < 1e-6 * np.abs(found).max()


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=label)
def test_gradients_of_functions_are_symmetric_and_the_local_one_is_not(environment):
    instance = drawn(environment)
    assert asymmetry(jacobian("reverse_kl", instance)) < 1e-12
    assert asymmetry(jacobian("local_reverse_kl", instance)) > 1e-2
    one_step = dataclasses.replace(instance, environment=dataclasses.replace(environment, horizon=1))
    assert asymmetry(jacobian("local_reverse_kl", one_step)) < 1e-15


def test_what_cannot_be_had_is_refused_in_words():
    with pytest.raises(UsageError, match="'forward_kl' is not known"):
        jacobian("forward_kl", drawn(sequence(2, 2)))
    with pytest.raises(InvalidEnvironmentError, match="a Jacobian needs their product squared"):
        jacobian("reverse_kl", Instance.draw(ngram(80, 4, 2), 0))
