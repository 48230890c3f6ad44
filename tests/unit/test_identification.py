"""Identification: what is a combination is found with its coefficients, and nothing else ever is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kltest.identify.identification import identify, independent


def random_gradients(seed: int, *, instances: int = 4, contexts: int = 13, tokens: int = 3) -> list[np.ndarray]:
    """Gradients with respect to logits: every context's entries sum to zero."""
    drawn = np.random.default_rng(seed).standard_normal((instances, contexts, tokens))
    return list(drawn - drawn.mean(axis=2, keepdims=True))


def mixture(candidates: dict[str, list[np.ndarray]], weights: dict[str, float]) -> list[np.ndarray]:
    return [sum(c * candidates[n][i] for n, c in weights.items()) for i in range(4)]


CANDIDATES = {name: random_gradients(index) for index, name in enumerate("abcdefghijklmnopqrst")}


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(CANDIDATES)), min_size=1, max_size=3, unique=True),
    coefficients=st.lists(st.floats(0.01, 100).flatmap(lambda c: st.sampled_from([c, -c])), min_size=3, max_size=3),
)
def test_a_short_combination_is_found_with_its_coefficients(names, coefficients):
    weights = dict(zip(names, coefficients, strict=False))
    found = identify(mixture(CANDIDATES, weights), CANDIDATES)
    assert found.combination is not None
    assert set(found.combination) == set(weights)
    for name, coefficient in weights.items():
        # Solving for at most three well-separated columns loses few digits; terms up to 1e4 times smaller lose four.
        assert found.combination[name] == pytest.approx(coefficient, rel=1e-7)
    assert found.residual < 1e-9


@pytest.mark.parametrize("seed", range(1000, 1050))
def test_a_random_gradient_is_null(seed):
    found = identify(random_gradients(seed), CANDIDATES)
    assert found.combination is None
    assert 0.1 < found.residual <= 1


def test_four_terms_are_too_many():
    found = identify(mixture(CANDIDATES, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}), CANDIDATES)
    assert found.combination is None


def test_coefficients_that_differ_between_instances_are_null():
    gradients = [(1 + 0.001 * i) * gradient for i, gradient in enumerate(CANDIDATES["a"])]
    assert identify(gradients, CANDIDATES).combination is None


def test_the_held_out_instance_must_agree_too():
    gradients = list(CANDIDATES["a"])
    gradients[-1] = gradients[-1] * 1.001
    assert identify(gradients, CANDIDATES).combination is None


def test_the_first_name_wins_among_dependent_ones():
    candidates = {"first": CANDIDATES["a"], "copy": [2 * g for g in CANDIDATES["a"]], "other": CANDIDATES["b"]}
    assert identify(CANDIDATES["a"], candidates).combination == pytest.approx({"first": 1.0})
    columns = {name: np.concatenate([g.ravel() for g in gs]) for name, gs in candidates.items()}
    assert independent(columns) == ["first", "other"]


def test_future_reverse_kl_is_named_alone_and_never_in_company():
    candidates = {
        "reverse_kl": CANDIDATES["a"],
        "local_reverse_kl": CANDIDATES["b"],
        "future_reverse_kl": mixture(CANDIDATES, {"a": 1.0, "b": -1.0}),
        "forward_kl": CANDIDATES["c"],
    }
    alone = identify(mixture(CANDIDATES, {"a": 3.0, "b": -3.0}), candidates)
    assert alone.combination == pytest.approx({"future_reverse_kl": 3.0})
    company = identify(mixture(CANDIDATES, {"a": 1.0, "b": -1.0, "c": 1.0}), candidates)
    assert company.combination == pytest.approx({"reverse_kl": 1.0, "local_reverse_kl": -1.0, "forward_kl": 1.0})


def test_too_few_degrees_of_freedom_are_null():
    """Three instances of two actions: three equations, so two terms always nearly fit and one must not count as two."""
    candidates = {name: random_gradients(index, contexts=1, tokens=2) for index, name in enumerate("abc")}
    two = [candidates["a"][i] + candidates["b"][i] for i in range(4)]
    assert identify(two, candidates).combination is None
    assert identify(candidates["b"], candidates).combination == pytest.approx({"b": 1.0})


@pytest.mark.parametrize(("size", "zero"), [(1e-14, True), (1e-6, False)])
def test_zero_is_told_by_the_size_of_single_gradients(size, zero):
    """Rounding of a mean over gradients of size 1 is about 1e-16; a true gradient of 1e-6 is not rounding."""
    gradients = [size * gradient for gradient in CANDIDATES["a"]]
    found = identify(gradients, CANDIDATES, magnitudes=[1.0] * 4)
    assert (found.combination == {"zero": 1.0}) is zero
    if not zero:
        assert found.combination == pytest.approx({"a": size})


def test_a_tiny_coefficient_is_not_zero_when_single_gradients_are_as_tiny():
    gradients = [1e-15 * gradient for gradient in CANDIDATES["a"]]
    found = identify(gradients, CANDIDATES, magnitudes=[1e-15] * 4)
    assert found.combination == pytest.approx({"a": 1e-15})


def test_float32_noise_is_tolerated_only_where_the_loss_computed_in_float32():
    noisy = [g + 1e-6 * n for g, n in zip(CANDIDATES["a"], random_gradients(999), strict=True)]
    assert identify(noisy, CANDIDATES).combination is None
    found = identify(noisy, CANDIDATES, dtype="float32")
    assert found.combination is not None
    assert set(found.combination) == {"a"}
