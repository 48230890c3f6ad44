"""Numbers that were published or can be worked out by hand."""

import numpy as np
import pytest

from kltest.environments import Instance, bandit, mdp, ngram, ragged, tabular
from kltest.truth import gradient, value
from kltest.truth.recursions import total_visits


def of_probabilities(environment, policy, reference):
    return Instance.of(environment, np.log(np.array(policy)), np.log(np.array(reference)))


def test_a_sign_flips_between_the_two_directions():
    """Published to four digits: truth (.3719, −.0153, −.1724, −.1843), k3 loss (.3, .1, −.1, −.3)."""
    policy, reference = np.array([[0.4, 0.3, 0.2, 0.1]]), np.array([[0.1, 0.2, 0.3, 0.4]])
    instance = of_probabilities(bandit(4), policy, reference)
    np.testing.assert_allclose(gradient("reverse_kl", instance)[0], [0.3719, -0.0153, -0.1724, -0.1843], atol=5e-5)
    np.testing.assert_allclose(gradient("forward_kl", instance)[0], [0.3, 0.1, -0.1, -0.3], rtol=1e-12)
    u = np.log(policy / reference)
    assert value("kl", instance) == pytest.approx((policy * u).sum(), rel=1e-13)
    assert value("kl", instance) == pytest.approx(0.4564, abs=5e-5)
    assert value("squared_log_ratio", instance) == pytest.approx(0.5216, abs=5e-5)
    assert value("total_variation", instance) == pytest.approx(0.4, rel=1e-12)
    assert value("chi_square", instance) == pytest.approx(0.5 * ((policy**2 / reference).sum() - 1), rel=1e-12)


def test_geometric_lengths():
    """Ending with chance q at every token: E[L] = (1 − (1 − q)^T)/q, and KL per token is that of one token."""
    length, logits = 500, np.array([[0.3, -0.2, -2.0]])
    environment = ngram(3, length, 1, end_token=2)
    instance = Instance.of(environment, logits, np.array([[0.0, 0.5, -1.0]]))
    q = np.exp(instance.policy[0, 2])
    assert value("expected_length", instance) == pytest.approx((1 - (1 - q) ** length) / q, rel=1e-12)
    one = Instance.of(bandit(3), logits, instance.reference)
    assert value("kl_per_token", instance) == pytest.approx(value("kl", one), rel=1e-12)


@pytest.mark.scheduled
def test_large_environments_obey_the_identities():
    """100,000 states, horizon 30: no enumeration. KL(π‖ref) + H(π) = −E_π[Σ log ref], three separate recursions."""
    environment = mdp(100_000, 4, 30, branches=5, seed=1)
    generator = np.random.default_rng(0)
    instance = Instance.of(environment, *generator.standard_normal((2, 100_000, 4)))
    pays_reference = type(environment)(**{**vars(environment), "reward": instance.reference})
    cross = Instance.of(pays_reference, instance.policy, instance.reference)
    # Entries are 1e-3 of the sums that they are differences of.
    total = gradient("reverse_kl", instance) + gradient("entropy", instance) + gradient("expected_reward", cross)
    assert np.abs(total).max() <= 1e-11 * np.abs(gradient("entropy", instance)).max()
    assert value("expected_length", instance) == pytest.approx(30, rel=1e-11)


def test_visits_of_a_stationary_process():
    """In a process that is already in its stationary distribution, total visits are T times that."""
    chances = np.array([[0.9, 0.1], [0.4, 0.6]])
    stationary = np.array([0.8, 0.2])
    environment = tabular(
        np.tile([0, 1], (2, 1, 1)), chances[:, None, :], np.zeros((2, 1)), 50, start=stationary, name="two states"
    )
    np.testing.assert_allclose(total_visits(environment, np.zeros((2, 1))), 50 * stationary, rtol=1e-13)


def test_mean_of_token_means_by_hand():
    """π ends at once with chance .5, else after a second token."""
    environment = ragged(2, 2)
    policy, reference = [[0.5, 0.5], [0.25, 0.75]], [[0.75, 0.25], [0.5, 0.5]]
    instance = of_probabilities(environment, policy, reference)
    stay, end = np.log(0.5 / 0.75), np.log(0.5 / 0.25)
    second = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    assert value("kl", instance) == pytest.approx(0.5 * end + 0.5 * (stay + second), rel=1e-13)
    assert value("mean_of_token_means", instance) == pytest.approx(0.5 * end + 0.25 * (stay + second), rel=1e-13)
    assert value("expected_length", instance) == pytest.approx(1.5, rel=1e-13)
