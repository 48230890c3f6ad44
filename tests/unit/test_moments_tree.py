"""Rollouts kept as a tree are the same rollouts: fields, sums, parts and probabilities."""

import numpy as np
import pytest
from moments_plain import ENVIRONMENTS

from kltest.environments import Paths, tabular

TERMINATING = tabular(
    np.array([[[1, -1], [0, 1]], [[-1, 0], [0, 1]]]),
    np.array([[[0.3, 0.7], [1.0, 0.0]], [[1.0, 0.0], [0.5, 0.5]]]),
    np.zeros((2, 2)),
    4,
    start=np.array([0.5, 0.5]),
    name="ends by chance",
)
ALL = [*ENVIRONMENTS.values(), TERMINATING]


def flat(paths):
    """The same rows without their tree."""
    return Paths(paths.contexts, paths.tokens, paths.mask, paths.prompt, paths.log_weight)


@pytest.mark.parametrize("environment", ALL, ids=lambda environment: environment.name)
def test_fields_and_sums_equal_gathers_and_scatters(environment):
    generator = np.random.default_rng(0)
    paths = environment.enumerate()
    table = generator.standard_normal((environment.n_contexts, environment.vocabulary))
    live = paths.mask
    assert np.array_equal(paths.chosen(table)[live], table[paths.contexts, paths.tokens][live])
    assert np.array_equal(paths.everything(table)[live], table[paths.contexts][live])
    assert paths.chosen(table).flags.c_contiguous
    # Sums in another order.
    assert np.allclose(paths.log_probability(table), flat(paths).log_probability(table), rtol=1e-13, atol=1e-13)
    values = generator.standard_normal(paths.shape) * live
    wide = generator.standard_normal((*paths.shape, environment.vocabulary)) * live[..., None]
    for given in (values, wide):
        expected = np.zeros_like(table)
        index = (paths.contexts, paths.tokens) if given.ndim == 2 else (paths.contexts,)
        np.add.at(expected, index, given)
        for rows in (paths, flat(paths)):
            found = np.zeros_like(table)
            rows.collect(given, found)
            assert np.allclose(found, expected, rtol=1e-12, atol=1e-12)
        for size in (1, 2, 5, 7, 1000):
            found = np.zeros_like(table)
            for rows, part in paths.split(size):
                assert 0 < len(part) <= size
                assert np.array_equal(part.tokens, paths.tokens[rows])
                assert np.array_equal(part.contexts, paths.contexts[rows])
                assert np.array_equal(part.mask, paths.mask[rows])
                part.collect(given[rows], found)
            assert np.allclose(found, expected, rtol=1e-12, atol=1e-12)
    rows = generator.integers(len(paths), size=9)
    for taken, index in ((paths.take(rows), rows), (paths.take(slice(1, None, 2)), slice(1, None, 2))):
        for name in ("contexts", "tokens", "mask", "prompt", "log_weight"):
            assert np.array_equal(getattr(taken, name), getattr(paths, name)[index])


@pytest.mark.parametrize("environment", ALL, ids=lambda environment: environment.name)
def test_expected_returns_equal_the_sum_over_rollouts(environment):
    generator = np.random.default_rng(1)
    log_probs = generator.standard_normal((environment.n_contexts, environment.vocabulary))
    log_probs -= np.log(np.exp(log_probs).sum(axis=1, keepdims=True))
    paths = environment.enumerate()
    weights, returns = np.exp(paths.log_probability(log_probs)), environment.returns(paths)
    for prompt, chance in enumerate(environment.prompts):
        here = paths.prompt == prompt
        expected = weights[here] @ returns[here] / chance
        assert environment.expected_returns(log_probs)[prompt] == pytest.approx(expected, rel=1e-12, abs=1e-14)
