"""Jacobians of the named gradients, against torch's second derivatives over all enumerated rollouts."""

import dataclasses

import numpy as np
import pytest
import torch
from jacobians import asymmetry, jacobian

from kltest.environments import Instance, mdp, ngram, ragged, sequence
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.truth import gradient

ENVIRONMENTS = (sequence(2, 3), ragged(3, 3), ngram(2, 5, 2), ngram(2, 4, 3, end_token=1), mdp(horizon=4))
NAMES = ("reverse_kl", "local_reverse_kl", "expected_reward")


def drawn(environment, seed=3):
    reward = np.random.default_rng(seed).standard_normal((environment.n_contexts, environment.vocabulary))
    return Instance.draw(dataclasses.replace(environment, reward=reward), seed, distance=4.0)


def again(name, instance):
    """The same matrix by double backward: the field as a graph of its own, every entry differentiated."""
    paths = instance.paths
    contexts, tokens = torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
    mask, weight = torch.from_numpy(paths.mask), torch.from_numpy(paths.log_weight)
    logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
    reference = torch.from_numpy(instance.reference)
    log_probs = torch.log_softmax(logits, dim=1)
    logp = torch.where(mask, log_probs[contexts, tokens], 0.0)
    chance = (weight + logp.sum(dim=1)).exp()
    if name == "local_reverse_kl":
        # Σ over rollouts of the chance, differentiable, of visiting a context times that context's own gradient.
        each = (log_probs.exp() * (log_probs - reference)).sum(dim=1)
        (own,) = torch.autograd.grad(each.sum(), logits, create_graph=True)
        visits = torch.zeros(len(reference), dtype=torch.float64)
        visits = visits.index_add(0, contexts.flatten(), (chance[:, None] * mask).flatten())
        field = visits[:, None] * own
    else:
        u = torch.where(mask, (log_probs - reference)[contexts, tokens], 0.0)
        paid = u if name == "reverse_kl" else torch.from_numpy(instance.environment.reward)[contexts, tokens] * mask
        (field,) = torch.autograd.grad((chance * paid.sum(dim=1)).sum(), logits, create_graph=True)
    rows = [torch.autograd.grad(entry, logits, retain_graph=True)[0].flatten() for entry in field.flatten()]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=lambda environment: f"{environment.name}-{environment.horizon}"
)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_second_derivative_of_the_definition(name, environment):
    instance = drawn(environment)
    expected = again(name, instance)
    # Both are sums of a few hundred terms in double precision.
    assert np.abs(jacobian(name, instance) - expected).max() < 1e-12 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=lambda environment: f"{environment.name}-{environment.horizon}"
)
def test_gradients_of_functions_are_symmetric_and_the_local_one_is_not(environment):
    instance = drawn(environment)
    assert asymmetry(again("reverse_kl", instance)) < 1e-12
    assert asymmetry(jacobian("local_reverse_kl", instance)) > 1e-2
    one_step = dataclasses.replace(instance, environment=dataclasses.replace(environment, horizon=1))
    assert asymmetry(jacobian("local_reverse_kl", one_step)) < 1e-15


def test_it_says_how_the_gradient_moves_at_a_horizon_that_cannot_be_enumerated():
    """A directional difference of the gradient itself; central, so that its error is of the order of step²."""
    instance = drawn(ngram(3, 400, 2))
    direction, step = np.random.default_rng(0).standard_normal(instance.policy.shape), 1e-5
    for name in NAMES:
        ends = [
            gradient(
                name, Instance.of(instance.environment, instance.policy + sign * step * direction, instance.reference)
            )
            for sign in (1, -1)
        ]
        moved = (ends[0] - ends[1]).ravel() / (2 * step)
        found = jacobian(name, instance) @ direction.ravel()
        assert np.abs(found - moved).max() < 1e-6 * np.abs(found).max()


def test_what_cannot_be_had_is_refused_in_words():
    with pytest.raises(UsageError, match="'forward_kl' is not known"):
        jacobian("forward_kl", drawn(sequence(2, 2)))
    with pytest.raises(InvalidEnvironmentError, match="a Jacobian needs their product squared"):
        jacobian("reverse_kl", Instance.draw(ngram(80, 4, 2), 0))
