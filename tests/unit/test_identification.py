"""Identification: what is a combination is found with its coefficients, and nothing else ever is."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weekly import spread

from kltest.identify.case import Case, target, worst_cosine
from kltest.identify.evaluate import evaluate
from kltest.identify.identification import Identification, _residuals, identify, independent
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.moments import exact


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


@pytest.mark.parametrize("seed", spread(12, range(1000, 1050)))
def test_a_random_gradient_is_null(seed):
    found = identify(random_gradients(seed), CANDIDATES)
    assert found.combination is None
    assert 0.1 < found.residual <= 1


A, B, C = (CANDIDATES[name] for name in "abc")
DEPENDENT = {"first": A, "copy": [2 * each for each in A], "other": B}
FUTURE = {
    "reverse_kl": A,
    "local_reverse_kl": B,
    "future_reverse_kl": mixture(CANDIDATES, {"a": 1.0, "b": -1.0}),
    "forward_kl": C,
}
# Three instances of two actions: three equations, so two terms always nearly fit and one must not count as two.
FEW = {name: random_gradients(index, contexts=1, tokens=2) for index, name in enumerate("abc")}
NOISY = [g + 1e-6 * n for g, n in zip(A, random_gradients(999), strict=True)]
ONES = {"magnitudes": [1.0] * 4}  # rounding of a mean over gradients of size 1 is about 1e-16
ROWS = {
    "four terms are too many": (mixture(CANDIDATES, dict.fromkeys("abcd", 1.0)), CANDIDATES, {}, None),
    "coefficients that differ between instances": ([(1 + i / 1000) * g for i, g in enumerate(A)], CANDIDATES, {}, None),
    "the held-out instance must agree too": ([*A[:-1], 1.001 * A[-1]], CANDIDATES, {}, None),
    "the first name of dependent ones": (A, DEPENDENT, {}, {"first": 1.0}),
    "the future alone": (mixture(CANDIDATES, {"a": 3.0, "b": -3.0}), FUTURE, {}, {"future_reverse_kl": 3.0}),
    "the future never in company": (
        mixture(CANDIDATES, {"a": 1.0, "b": -1.0, "c": 1.0}),
        *(FUTURE, {}, {"reverse_kl": 1.0, "local_reverse_kl": -1.0, "forward_kl": 1.0}),
    ),
    "two terms in three equations": ([a + b for a, b in zip(FEW["a"], FEW["b"], strict=True)], FEW, {}, None),
    "one term in three equations": (FEW["b"], FEW, {}, {"b": 1.0}),
    "what rounding leaves": ([1e-14 * g for g in A], CANDIDATES, ONES, {"zero": 1.0}),
    "more than rounding leaves": ([1e-6 * g for g in A], CANDIDATES, ONES, {"a": 1e-6}),
    "as little as single gradients": ([1e-15 * g for g in A], CANDIDATES, {"magnitudes": [1e-15] * 4}, {"a": 1e-15}),
    "noise of float32 in float64": (NOISY, CANDIDATES, {}, None),
    "noise of float32": (NOISY, CANDIDATES, {"dtype": "float32"}, {"a": 1.0}),
}


@pytest.mark.parametrize(("gradients", "candidates", "options", "combination"), ROWS.values(), ids=ROWS)
def test_what_a_combination_is_and_what_is_none(gradients, candidates, options, combination):
    found = identify(gradients, candidates, **options).combination
    assert found == (combination and pytest.approx(combination, rel=1e-5, abs=0))


def test_of_dependent_names_the_first_are_kept():
    columns = {name: np.concatenate([g.ravel() for g in gs]) for name, gs in DEPENDENT.items()}
    assert independent(columns) == ["first", "other"]


@pytest.mark.parametrize("apart", [1.0, 1e-3])
def test_the_residual_without_a_name_is_that_of_the_best_three(apart):
    """By a fit of each three, also where two candidates are nearly the same."""
    drawn = {f"c{place}": random_gradients(place) for place in range(8)}
    drawn["c1"] = [c0 + apart * c1 for c0, c1 in zip(drawn["c0"], drawn["c1"], strict=True)]
    gradients = mixture(drawn, dict.fromkeys(("c0", "c1", "c2", "c3"), 1.0))

    target = np.concatenate([one.ravel() for one in gradients[:-1]])
    columns = [np.concatenate([one.ravel() for one in part[:-1]]) for part in drawn.values()]
    fits = (np.stack(three, axis=1) for terms in (1, 2, 3) for three in combinations(columns, terms))
    left = min(np.linalg.norm(target - fit @ np.linalg.lstsq(fit, target, rcond=None)[0]) for fit in fits)
    found = identify(gradients, drawn)
    assert found.combination is None
    assert found.residual == pytest.approx(left / np.linalg.norm(target), rel=1e-12)


def test_what_each_triple_leaves_is_what_least_squares_leaves():
    """All triples at once, those far from the best one too."""
    generator, subsets = np.random.default_rng(0), np.array(list(combinations(range(7), 3)))
    columns, noise = generator.standard_normal((7, 40)), generator.standard_normal(40)
    goal = columns[0] - 2 * columns[3] + columns[5] + noise
    left = [np.linalg.lstsq(columns[three].T, goal, rcond=None)[1][0] for three in subsets]
    assert _residuals(goal, columns, subsets) == pytest.approx(np.sqrt(left) / np.linalg.norm(goal), rel=1e-9)


def test_a_declared_gradient_whose_terms_cancel_is_exactly_zero():
    """The local gradient and that of the future make the whole one, and rounding is left of the difference."""
    parts, sequence = {"local_reverse_kl": -1.0, "future_reverse_kl": -1.0}, instances("sequence", 0)[0]
    assert not target({"reverse_kl": 1.0, **parts}, sequence, "current").any()
    assert target({"reverse_kl": 1.0 + 1e-9, **parts}, sequence, "current").any()


def test_the_cosine_is_that_of_the_worst_instance_and_zero_has_none():
    named, zero = Identification({"a": 1.0}, 0.0), Identification({"zero": 1.0}, 0.0)
    assert worst_cosine(A, [2 * one for one in A], named) == pytest.approx(1)
    assert worst_cosine(A, [*A[:-1], -3 * A[-1]], named) == pytest.approx(-1)
    assert worst_cosine(A, A, zero) is None


@pytest.mark.parametrize(("factor", "note"), [(1.0, ""), (1 + 1e-8, "to 1e-08 of it only"), (1.5, "")])
def test_a_gradient_that_is_right_to_fewer_digits_than_rounding_leaves_says_so(factor, note):
    def loss(logp, ref_logp):
        return factor * (logp - ref_logp).square() / 2

    case = Case("bandit", "current")
    row = evaluate(case, {"reverse_kl": 1.0}, [exact(bind(loss), one) for one in case.instances])
    assert row.agrees == (factor < 1.1)
    assert row.note.startswith(note)
    assert bool(row.note) == bool(note)
