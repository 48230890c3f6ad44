"""Numbers that were published or can be worked out by hand."""

import numpy as np
import pytest

from kltest.environments import Instance, bandit, mdp, ngram, ragged, sequence, tabular
from kltest.truth import gradient, value
from kltest.truth.recursions import total_visits


def of_probabilities(environment, policy, reference):
    return Instance.of(environment, np.log(np.array(policy)), np.log(np.array(reference)))


def test_two_arms_with_respect_to_the_probability():
    """Tang & Munos 2025: P = (.8, .2), Q = (.5, .5); d/dp = (d/dlogit)/(p(1 − p))."""
    instance = of_probabilities(bandit(2), [[0.8, 0.2]], [[0.5, 0.5]])
    slope = 0.8 * 0.2
    # ∂KL/∂p = log(p/q) − log((1−p)/(1−q)) = log 1.6 − log 0.4.
    assert gradient("reverse_kl", instance)[0, 0] / slope == pytest.approx(np.log(4), rel=1e-12)
    # ∂KL(Q‖P)/∂p = −.5/.8 + .5/.2.
    assert gradient("forward_kl", instance)[0, 0] / slope == pytest.approx(1.875, rel=1e-12)


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


@pytest.mark.parametrize("p", [0.5, 0.2, 0.9])
def test_blind_root(p):
    """At a root where π = ref the local gradient is 0; the truth is p(1 − p)·d, d the KL behind the first token."""
    after = np.array([0.7, 0.3])
    policy = [[p, 1 - p], after, [0.5, 0.5]]
    reference = [[p, 1 - p], [0.5, 0.5], [0.5, 0.5]]
    instance = of_probabilities(sequence(2, 2), policy, reference)
    d = float((after * np.log(after / 0.5)).sum())
    assert not gradient("local_reverse_kl", instance)[0].any()
    np.testing.assert_allclose(gradient("reverse_kl", instance)[0], p * (1 - p) * d * np.array([1, -1]), rtol=1e-12)


def test_the_pair_on_which_rao_blackwell_is_noisier():
    policy = [[0.5, 0.5], [0.5, 0.5], [0.01, 0.99]]
    reference = [[0.25, 0.75], [0.5, 0.5], [0.99, 0.01]]
    instance = of_probabilities(sequence(2, 2), policy, reference)
    assert value("kl", instance) == pytest.approx(2.39545, abs=5e-6)
    # The variance of the Monte Carlo estimate Σu, from its two moments.
    assert 2 * value("squared_log_ratio", instance) - value("kl", instance) ** 2 == pytest.approx(3.31591, abs=5e-6)


def test_a_unigram_is_so_many_independent_bandits():
    """T identical tokens: KL, entropy and their gradients are T times one token's; χ² multiplies."""
    length = 10_000
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((2, 1, 4))
    one, many = Instance.of(bandit(4), *logits), Instance.of(ngram(4, length, 1), *logits)
    for name in ("reverse_kl", "forward_kl", "entropy", "local_squared_log_ratio"):
        # Sums of 10,000 terms: rounding of 1e-16 each, at most 1e-12 together.
        np.testing.assert_allclose(gradient(name, many), length * gradient(name, one), rtol=1e-11)
        assert value(name, many) == pytest.approx(length * value(name, one), rel=1e-11)
    assert value("kl_per_token", many) == pytest.approx(value("kl", one), rel=1e-11)
    assert value("mean_of_token_means", many) == pytest.approx(value("kl", one), rel=1e-11)
    ten = Instance.of(ngram(4, 10, 1), *logits)
    assert 1 + 2 * value("chi_square", ten) == pytest.approx((1 + 2 * value("chi_square", one)) ** 10, rel=1e-12)
    # ½E[U²] = ½(T·Var u + (T·KL)²).
    kl = value("kl", one)
    variance = 2 * value("squared_log_ratio", one) - kl**2
    half_square = 0.5 * (length * variance + (length * kl) ** 2)
    assert value("squared_log_ratio", many) == pytest.approx(half_square, rel=1e-11)


def test_geometric_lengths():
    """Ending with chance q at every token: E[L] = (1 − (1 − q)^T)/q, and KL per token is that of one token."""
    length, logits = 500, np.array([[0.3, -0.2, -2.0]])
    environment = ngram(3, length, 1, end_token=2)
    instance = Instance.of(environment, logits, np.array([[0.0, 0.5, -1.0]]))
    q = np.exp(instance.policy[0, 2])
    assert value("expected_length", instance) == pytest.approx((1 - (1 - q) ** length) / q, rel=1e-12)
    one = Instance.of(bandit(3), logits, instance.reference)
    assert value("kl_per_token", instance) == pytest.approx(value("kl", one), rel=1e-12)


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
