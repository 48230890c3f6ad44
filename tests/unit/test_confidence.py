"""Confidence sequences: the papers' formulas in one dimension, the inequality behind vectors, coverage at all times."""

import numpy as np
import pytest
from scipy.optimize import linprog

from kltest.errors import UsageError
from kltest.moments.confidence import FEW_DIMENSIONS, LARGEST_BET, Asymptotic, EmpiricalBernstein, squared_radius, tuned

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


def test_in_one_dimension_the_asymptotic_sphere_is_the_published_interval():
    """Waudby-Smith et al. 2024, Theorem 2.2: σ̂·√(2(tρ² + 1)/(t²ρ²)·log(√(tρ² + 1)/α)), here with ρ² = σ̂²/κ."""
    x, alpha, mixture = np.random.default_rng(1).exponential(size=3000), 1e-3, 7.0
    stream = Asymptotic(alpha, mixture, start=1)
    for first in range(0, len(x), 100):
        stream.update(x[first : first + 100, None], longest=0.0)
        seen = x[: first + 100]
        t, rho = len(seen), seen.std() / np.sqrt(mixture)
        half = seen.std() * np.sqrt(2 * (t * rho**2 + 1) / (t**2 * rho**2) * np.log(np.sqrt(t * rho**2 + 1) / alpha))
        np.testing.assert_allclose(stream.sphere.radius, half, rtol=1e-10)
        np.testing.assert_allclose(stream.sphere.centre, [seen.mean()], rtol=1e-12)


def test_the_sphere_contains_the_ellipsoid_and_touches_it():
    """On the axis of the largest variance the mixture's own boundary, (S − nμ)ᵀ(V + κ)⁻¹(S − nμ) = 2·log(…), is met."""
    generator = np.random.default_rng(2)
    x = generator.standard_normal((500, 4)) @ generator.standard_normal((4, 4))
    stream = Asymptotic(0.01, 30.0, start=1)
    stream.update(x[:200], longest=0.0)
    stream.update(x[200:], longest=0.0)
    scatter = np.cov(x.T, bias=True) * len(x)
    level = 2 * np.log(1 / 0.01) + np.linalg.slogdet(np.eye(4) + scatter / 30.0)[1]
    inverse = np.linalg.inv(scatter + 30.0 * np.eye(4))
    radius = float(stream.sphere.radius) * len(x)
    directions = generator.standard_normal((2000, 4))
    directions = np.vstack([directions, np.linalg.eigh(scatter)[1][:, -1]])
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    reach = np.sqrt(level / np.einsum("nd,de,ne->n", directions, inverse, directions))
    assert reach.max() <= radius * (1 + 1e-9)
    np.testing.assert_allclose(reach[-1], radius, rtol=1e-9)


def test_bounds_on_eigenvalues_enlarge_the_sphere():
    generator = np.random.default_rng(3)
    x = generator.standard_normal((FEW_DIMENSIONS + 50, FEW_DIMENSIONS + 10)) * np.linspace(0.1, 2, FEW_DIMENSIONS + 10)
    scatter = x.T @ x
    exact = np.linalg.eigvalsh(scatter)
    for mixture in (1.0, 100.0, 1e4):
        level = 2 * np.log(1e6) + np.log1p(exact.clip(min=0) / mixture).sum()
        bound = squared_radius(scatter, np.asarray(mixture), 1e-6)
        assert (exact[-1] + mixture) * level <= bound <= 20 * (exact[-1] + mixture) * level


def test_a_tuned_mixture_is_the_smallest_sphere_at_the_number_of_samples_it_names():
    covariance = np.diag([3.0, 1.0, 0.2])
    mixture, samples = tuned(covariance, 0.1, 1e-4)
    scatter = samples * covariance
    radius = np.sqrt(squared_radius(scatter, np.asarray(mixture), 1e-4)) / samples
    np.testing.assert_allclose(radius, 0.1, rtol=1e-9)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert squared_radius(scatter, np.asarray(factor * mixture), 1e-4) >= (0.1 * samples) ** 2 * (1 - 1e-9)


def worst_growth(bet, penalty, start):
    """The most by which E[cosh‖s + λ(x − μ)‖·exp(−ψ‖x − c‖²)] exceeds cosh‖s‖, over all distributions of x.

    With ‖x − c‖ ≤ 1, c = 0 and E[x] = μ: for each μ of a grid a linear program over probabilities on the grid. Two
    coordinates span s and μ; what lies outside of their plane enters by its length alone, and has mean zero when it is
    given either sign: so that this is all there is in any number of dimensions.
    """
    radii, angles, tilts = np.linspace(0, 1, 11)[1:], np.linspace(0, 2 * np.pi, 25)[:-1], np.linspace(0, np.pi / 2, 4)
    ring = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    flat = np.cos(tilts)[:, None, None] * ring
    ball = np.concatenate([flat, np.broadcast_to(np.sin(tilts)[:, None, None], (4, 24, 1))], axis=-1)
    points = np.concatenate([np.zeros((1, 3)), (radii[:, None, None, None] * ball).reshape(-1, 3)])
    worst = -np.inf
    for mean in points[(points[:, 2] == 0)][::5]:
        distance = np.linalg.norm([start, 0, 0] + bet * (points - mean), axis=1)
        growth = np.cosh(distance) / np.cosh(start) * np.exp(-penalty * (points**2).sum(axis=1))
        constraints = np.vstack([points[:, :2].T, np.ones(len(points))])
        worst = max(worst, -linprog(-growth, A_eq=constraints, b_eq=[*mean[:2], 1.0]).fun - 1)
    return worst


@pytest.mark.parametrize("bet", [0.05, LARGEST_BET])
def test_no_distribution_makes_the_vector_process_grow(bet):
    penalty = -np.log1p(-bet) - bet
    # The point mass at c leaves it as it is, so that the largest growth is 0 up to rounding.
    assert max(worst_growth(bet, penalty, start) for start in (0.0, 0.4, 2.0, 15.0)) < 1e-9
    assert worst_growth(bet, 0.7 * penalty, 15.0) > 1e-4, "a smaller penalty is not enough, and the program sees it"


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


def skewed(generator, shape):
    return generator.exponential(size=shape) - 1


def heavy(generator, shape):
    """Student's t with five degrees of freedom: four moments, and tails of a power."""
    return generator.standard_t(5, size=shape)


def rare(generator, shape):
    """Mostly nothing, seldom something large."""
    return 10 * ((generator.random(shape) < 0.02) - 0.02)


@pytest.mark.parametrize("draw", [skewed, heavy, rare])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_asymptotic_spheres_cover_at_all_times(draw, dimensions):
    generator, alpha, count = np.random.default_rng(6), 0.1, 4000
    streams = Asymptotic(alpha, np.full(count, 200.0), start=100)
    sup, last, naive = np.zeros((3, count), dtype=bool)
    for _ in range(60):
        streams.update(draw(generator, (20, count, dimensions)))
        centre, radius = streams.sphere
        distance = np.linalg.norm(centre, axis=1)
        last = distance > radius
        sup |= last
        if dimensions == 1 and streams.count >= 100:
            naive |= distance > 1.6449 * np.sqrt(streams.scatter[:, 0, 0]) / streams.count
    assert last.mean() <= sup.mean() <= alpha
    if dimensions == 1:
        assert naive.mean() > 2 * alpha, "intervals for one time miss at some time, and this test sees it"


def test_nothing_is_said_before_the_start_and_no_variance_is_no_certainty():
    stream = Asymptotic(1e-6, 1.0, start=50)
    stream.update(np.full((49, 2), 3.0))
    assert np.isinf(stream.sphere.radius)
    stream.update(np.full((51, 2), 3.0))
    # Of an event with a chance of log(1/α)/n nothing is seen with probability α.
    assert stream.sphere.radius >= np.log(1e6) * np.sqrt(18) / 100


@pytest.mark.parametrize(("draw", "share", "wrong"), [(skewed, 1.0, "refuted"), (rare, 1.001, "confirmed")])
def test_false_alarms_of_ten_thousand_gradings_stay_below_the_error_rate(draw, share, wrong):
    """A bias of exactly the margin must not be refuted, one above it not be confirmed, whenever one stops.

    Each grading takes away shared noise with a coefficient from its own earlier samples, and stops at its decision.
    """
    generator, alpha, margin, chunk = np.random.default_rng(7), 0.2, 0.5, 40
    bias = share * margin * np.array([0.6, 0.8])
    streams = Asymptotic(alpha, np.full(GRADINGS, 100.0), start=120)
    verdicts = np.full(GRADINGS, "open", dtype="<U9")
    shared, square = np.zeros((2, GRADINGS))
    for step in range(30):
        known = draw(generator, (chunk, GRADINGS, 2))
        x = bias + 0.8 * known + 0.6 * draw(generator, (chunk, GRADINGS, 2))
        if step:
            rest = x - (shared / square)[:, None] * known
            streams.update(rest, longest=np.linalg.norm(x, axis=-1).max(axis=0))
            centre, radius = streams.sphere
            distance, undecided = np.linalg.norm(centre, axis=1), verdicts == "open"
            verdicts[undecided & (distance + radius <= margin)] = "confirmed"
            verdicts[undecided & (distance - radius > margin)] = "refuted"
        shared += (x * known).sum(axis=(0, 2))
        square += (known**2).sum(axis=(0, 2))
    assert (verdicts == wrong).mean() <= alpha


def test_gradings_far_from_the_margin_are_decided():
    """The same simulation with half and with three times the margin: most verdicts are right, so that the error rate
    is not kept by saying nothing."""
    generator, margin = np.random.default_rng(8), 0.5
    for share, right in ((0.2, "confirmed"), (3.0, "refuted")):
        streams = Asymptotic(0.2, np.full(2000, 100.0), start=120)
        for _ in range(40):
            streams.update(share * margin * np.array([0.6, 0.8]) + skewed(generator, (40, 2000, 2)))
        centre, radius = streams.sphere
        distance = np.linalg.norm(centre, axis=1)
        decided = distance + radius <= margin if right == "confirmed" else distance - radius > margin
        assert decided.mean() > 0.95


def test_a_sample_beyond_the_bound_is_refused():
    stream = EmpiricalBernstein(1.0, 0.05)
    with pytest.raises(UsageError, match=r"norm 1\.5, beyond the bound of 1 "):
        stream.update(np.array([[0.5, 0.0], [1.5, 0.0]]))
