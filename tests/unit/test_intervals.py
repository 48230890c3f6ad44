"""Intervals of samples: coverage by simulation, the paper's formula in one dimension, the inequality behind vectors."""

import numpy as np
import pytest
from weekly import first

from kltest.samples.blocks import Sample, norm
from kltest.samples.bounded import LARGEST_BET, EmpiricalBernstein
from kltest.samples.fits import distance

GRADINGS = 10_000


def plug_in_empirical_bernstein(x, alpha, most):
    """Waudby-Smith & Ramdas 2024, Theorem 2, for samples in [0, 1]: one sample after the other."""
    intervals, total, squares = [], 0.0, 0.0
    numerator = weights = penalty = 0.0
    for t, sample in enumerate(x, 1):
        before, variance = (0.5 + total) / t, (0.25 + squares) / t
        bet = min(np.sqrt(2 * np.log(2 / alpha) / (variance * t * np.log(1 + t))), most)
        numerator += bet * sample
        weights += bet
        penalty += 4 * (sample - before) ** 2 * (-np.log(1 - bet) - bet) / 4
        total += sample
        squares += (sample - (0.5 + total) / (t + 1)) ** 2
        half = (np.log(2 / alpha) + penalty) / weights
        intervals.append((numerator / weights - half, numerator / weights + half))
    return np.array(intervals)


def test_in_one_dimension_the_bounded_sphere_is_the_published_interval():
    x = np.random.default_rng(0).beta(2, 5, size=400)
    stream, found = EmpiricalBernstein(0.5, 0.05), []
    for sample in x:
        stream.update(np.array([[sample - 0.5]]))
        centre, radius = stream.sphere
        found.append((0.5 + centre[0] - radius, 0.5 + centre[0] + radius))
    # Sums of 400 terms of order one, in another order.
    np.testing.assert_allclose(found, plug_in_empirical_bernstein(x, 0.05, LARGEST_BET), rtol=0, atol=1e-12)


def bernoulli(generator, shape):
    return (generator.random(shape) < 0.03).astype(float), 0.03


def nearly_constant(generator, shape):
    return generator.beta(200, 20, size=shape), 200 / 220


def two_points(generator, shape):
    return generator.choice([0.0, 1.0], size=shape), 0.5


@pytest.mark.parametrize("draw", [bernoulli, nearly_constant, two_points])
def test_bounded_spheres_cover_at_all_times(draw):
    generator, alpha = np.random.default_rng(4), 0.1
    streams, missed = EmpiricalBernstein(0.5, alpha), np.zeros(GRADINGS, dtype=bool)
    for _ in range(400):
        x, mean = draw(generator, (1, GRADINGS, 1))
        streams.update(x - 0.5)
        centre, radius = streams.sphere
        missed |= np.abs(0.5 + centre[:, 0] - mean) > radius
    assert missed.mean() <= alpha
    assert radius.max() < 0.3, "and they say something"


def test_bounded_spheres_cover_vectors_whose_noise_depends_on_the_past():
    """A martingale difference sequence: the scale of each sample is set by the sum of those before it."""
    generator, alpha, count = np.random.default_rng(5), 0.2, 5000
    mean = np.array([0.2, -0.1, 0.0])
    streams, missed, total = EmpiricalBernstein(1.0, alpha), np.zeros(count, dtype=bool), np.zeros((count, 3))
    for _ in range(300):
        direction = generator.standard_normal((count, 3))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        x = mean + np.where(total[:, :1] > 0, 0.7, 0.05) * direction
        total += x - mean
        streams.update(x[None])
        centre, radius = streams.sphere
        missed |= np.linalg.norm(centre - mean, axis=1) > radius
    assert missed.mean() <= alpha


NOISES = {
    "skewed": lambda generator, shape: generator.exponential(size=shape) - 1,
    "normal": lambda generator, shape: generator.standard_normal(shape),
    # Student's t with five degrees of freedom: four moments, and tails of a power.
    "heavy": lambda generator, shape: generator.standard_t(5, size=shape),
}


@pytest.mark.parametrize("noise", first(1, NOISES))
@pytest.mark.parametrize("bias", first(1, [0.1, 0.0, 1.0]))
def test_bounds_on_a_distance_miss_it_as_seldom_as_stated(noise, bias):
    """Biases of none, of a few standard errors and of many: around the second the square is neither normal nor a χ²."""
    generator, rate, tries = np.random.default_rng(6), 0.05, 400
    away, rows = bias * np.array([0.6, 0.8, 0.0]), np.eye(3)
    missed, widths = 0, []
    for _ in range(tries):
        mean = away + NOISES[noise](generator, (64, 32, 3)).mean(axis=1)
        sample = Sample(np.stack([mean, mean, np.broadcast_to([1.0, 0.0, 0.0], mean.shape)], axis=1))
        found = distance(sample, rows[1], rows[2], rows[2:], (), rate)
        missed += not found.low <= bias <= found.high
        widths.append(found.width)
    # Three standard deviations of a binomial share above the rate.
    assert missed / tries <= rate + 3 * np.sqrt(rate * (1 - rate) / tries)
    assert np.median(widths) < 0.3, "and they say something"


def test_what_was_not_seen_moves_both_ends():
    generator, rows = np.random.default_rng(7), np.eye(3)
    mean = np.array([2.0, 0.0]) + 0.01 * generator.standard_normal((64, 2))
    sample = Sample(np.stack([mean, mean, np.broadcast_to([4.0, 0.0], mean.shape)], axis=1))
    near, far = (distance(sample, rows[1], rows[2], rows[2:], (), 0.01, unseen) for unseen in (0.0, 0.4))
    assert (near.low - far.low, far.high - near.high) == pytest.approx((0.2, 0.1), rel=1e-6)


@pytest.mark.scheduled
def test_events_that_half_of_the_blocks_did_not_see_refute_nothing():
    """Planted: noise of one sample in seventy. Without `unseen` a half that saw none would be sure of its mean."""
    generator, rows, refuted = np.random.default_rng(8), np.eye(3), {0.0: 0, 1.0: 0}
    for _ in range(300):
        drawn = 10 * ((generator.random((512, 1)) < 0.015) - 0.015)
        mean = drawn.reshape(64, 8, 1).mean(axis=1)
        sample = Sample(np.stack([mean, mean, np.ones_like(mean)], axis=1))
        for share in refuted:
            unseen = share * np.log(1 / 0.01) * np.abs(drawn).max() / 512
            refuted[share] += distance(sample, rows[1], rows[2], rows[2:], (), 0.01, unseen).low > 0
    assert refuted[1.0] <= 300 * 0.01 < refuted[0.0]


def test_the_error_of_a_squared_norm_of_pure_noise_is_the_spread_of_its_estimates():
    generator, d = np.random.default_rng(9), np.ones(1)
    samples = [Sample(generator.standard_normal((16, 1, 8))) for _ in range(500)]
    spread = np.std([float(norm(d)(one.products)) for one in samples])
    # The standard deviation of five hundred estimates is known to a few hundredths.
    assert np.mean([one.pairs(d) for one in samples]) == pytest.approx(spread, rel=0.12)


def test_noise_along_one_direction_is_bounded_by_its_variance():
    noise = np.random.default_rng(10).standard_normal(64)
    sample = Sample(noise[:, None, None] * np.array([[[0.6, 0.8, 0.0]]]))
    # The largest eigenvalue is the variance of the mean; the other bound is a little less where few directions are.
    assert sample.spread(np.ones(1))[1] == pytest.approx(noise.var(ddof=1) / 64, rel=0.05)
