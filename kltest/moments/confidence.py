"""Confidence sequences for the mean of a stream of vectors: spheres that hold at all times at once.

A sphere around an estimate contains the mean μ at every time, with probability at least 1 − α for the whole sequence,
so that sampling may stop at any time. In one dimension spheres are intervals; leading axes are independent streams.
Samples are a martingale difference sequence around μ: a sample may depend on earlier ones, as long as its mean, given
these, is μ.

`EmpiricalBernstein` holds at every sample size, and needs a bound on the norm of a sample. `Asymptotic` needs none: its
error rate is right in the limit of many samples only, as that of a central limit theorem. Both are written out here,
since scipy has intervals for one fixed sample size and one dimension, and none that hold at all times for vectors.
"""

from typing import NamedTuple

import numpy as np

from kltest.errors import UsageError

# Above 0.8 the vector-valued inequality is not proven.
LARGEST_BET = 0.8
# In more dimensions than this, eigenvalues are replaced by bounds on them.
FEW_DIMENSIONS = 256
# Candidates of `tuned`, as multiples of the largest eigenvalue.
MIXTURES = np.logspace(-4, 2, 61)


class Sphere(NamedTuple):
    """A sphere with `centre` (…, D) and `radius` (…), which is infinite until there are enough samples."""

    centre: np.ndarray
    radius: np.ndarray


class EmpiricalBernstein:
    """Spheres for samples of norm at most `bound`, in any number of dimensions.

        ‖Σ λᵢxᵢ/Σλᵢ − μ‖ ≤ (log(2/α) + Σ ψ(λᵢ)‖xᵢ − cᵢ‖²)/Σλᵢ,   ψ(λ) = −log(1 − λ) − λ,

    in units of the diameter 2·bound, with a bet λᵢ ≤ 0.8 and a centre cᵢ from earlier samples alone: valid at every
    sample size, since cosh‖Σλᵢ(xᵢ − μ)‖·exp(−Σψ(λᵢ)‖xᵢ − cᵢ‖²) is a supermartingale. The bets are those that suit the
    variance seen so far. In one dimension it is the predictable plug-in empirical Bernstein confidence sequence of
    Waudby-Smith & Ramdas 2024 (Estimating means of bounded random variables by betting, Theorem 2), whose
    supermartingale is that of Howard, Ramdas, McAuliffe & Sekhon 2021 (Time-uniform, nonparametric, nonasymptotic
    confidence sequences, Theorem 4); for vectors see Martinez-Taboada & Ramdas 2024 (Empirical Bernstein in smooth
    Banach spaces, arXiv 2409.06060).
    """

    asymptotic = False

    def __init__(self, bound: float, error_rate: float) -> None:
        self.bound = bound
        self.error_rate = error_rate
        self.count = 0
        self._bets = self._sum = self._penalty = self._total = self._squares = np.zeros(())

    def update(self, samples: np.ndarray, *, bound: float | None = None) -> None:
        """Add samples (n, …, D); bets and centre are those from before the call.

        `bound` is another largest norm, known before these samples were drawn. UsageError if one of them exceeds it.
        """
        bound = self.bound if bound is None else bound
        if (longest := float(np.sqrt(np.einsum("...d,...d->...", samples, samples).max()))) > bound * (1 + 1e-9):
            raise UsageError(f"a sample has norm {longest:.6g}, beyond the bound of {bound:.6g} that was stated")
        diameter, size = 2 * bound, len(samples)
        later = self.count + size
        # One imagined sample at the middle, with the largest variance 1/4, starts the mean and the variance.
        centre = _within(self._total / (self.count + 1), bound)
        variance = (0.25 + self._squares) / (self.count + 1)
        bet = np.sqrt(2 * np.log(2 / self.error_rate) / (variance * later * np.log1p(later))).clip(max=LARGEST_BET)
        total = samples.sum(axis=0)
        self._total = self._total + total
        self._bets = self._bets + size * bet / diameter
        self._sum = self._sum + (bet / diameter)[..., None] * total
        self._penalty = self._penalty + (-np.log1p(-bet) - bet) * _squared_distances(samples, centre) / diameter**2
        self._squares = self._squares + _squared_distances(samples, self._total / (later + 1)) / diameter**2
        self.count = later

    @property
    def sphere(self) -> Sphere:
        """A sphere around the mean; those of all times hold it at once, but for the error rate."""
        if self.count == 0:
            return Sphere(np.zeros(1), np.array(np.inf))
        radius = (np.log(2 / self.error_rate) + self._penalty) / self._bets
        return Sphere(self._sum / self._bets[..., None], radius)


def _within(point: np.ndarray, bound: float) -> np.ndarray:
    """(…, D) the nearest point of the ball of radius `bound`, which is no farther from any point of the ball."""
    distance = np.linalg.norm(point, axis=-1, keepdims=True) if point.ndim else np.zeros(1)
    return point * np.minimum(1.0, bound / np.maximum(distance, bound))


def _squared_distances(samples: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """(…) the sum over samples (n, …, D) of ‖x − centre‖²."""
    return ((samples - centre) ** 2).sum(axis=(0, -1))


class Asymptotic:
    """Spheres for samples of finite variance, with an error rate that is right as `start` grows.

    With n samples, S their sum, V the sum of their centred outer products and κ = `mixture` fixed in advance,

        (S − nμ)ᵀ(V + κ)⁻¹(S − nμ) ≤ 2·log(1/α) + log det(1 + V/κ)   for all n,

    Robbins' normal mixture in several dimensions: for Gaussian samples of covariance V/n the mixture over λ of
    exp(λ·(S − nμ) − λᵀVλ/2) is a martingale. For others it holds along the Gaussian walk that a strong invariance
    principle puts beside theirs, from `start` on, as in Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas 2024
    (Time-uniform central limit theory and asymptotic confidence sequences, Theorem 2.2, of which this is the
    multivariate form; there ρ² = σ²/κ). The sphere is the smallest around that ellipsoid,

        radius = √((λ_max(V) + κ)·(2·log(1/α) + log det(1 + V/κ)))/n + log(1/α)·b/n,

    where b, the longest sample seen (or what `update` is told), stands for what was not: an event that n samples miss
    with probability α has a chance of log(1/α)/n. This second term vanishes faster than the first, as a Bernstein
    bound's does, and keeps what has had no variance so far from having no radius.
    """

    asymptotic = True

    def __init__(self, error_rate: float, mixture: np.ndarray | float, *, start: int = 100) -> None:
        self.error_rate = error_rate
        self.mixture = np.asarray(mixture, dtype=float)
        self.start = start
        self.count = 0
        self._longest = self._origin = self._sum = self._outer = np.zeros(())

    def update(self, samples: np.ndarray, *, longest: np.ndarray | float | None = None) -> None:
        """Add samples (n, …, D); `longest` (…) is a norm for the second term if it is not the largest of these."""
        if self.count == 0:
            # Sums are of differences from the first mean, so that little cancels in the covariance.
            self._origin = samples.mean(axis=0)
        if longest is None:
            longest = np.sqrt((samples**2).sum(axis=-1)).max(axis=0)
        shifted = samples - self._origin
        self._sum = self._sum + shifted.sum(axis=0)
        moved = np.moveaxis(shifted, 0, -2)
        self._outer = self._outer + moved.swapaxes(-1, -2) @ moved
        self._longest = np.maximum(self._longest, longest)
        self.count += len(samples)

    @property
    def scatter(self) -> np.ndarray:
        """(…, D, D) sum of centred outer products, V."""
        total = self._sum
        return self._outer - total[..., :, None] * total[..., None, :] / self.count

    @property
    def sphere(self) -> Sphere:
        """A sphere around the mean, infinite before the start; all later ones hold it, but for the error rate."""
        if self.count == 0:
            return Sphere(np.zeros(1), np.array(np.inf))
        centre = self._origin + self._sum / self.count
        if self.count < self.start:
            return Sphere(centre, np.full(centre.shape[:-1], np.inf))
        spread = np.sqrt(squared_radius(self.scatter, self.mixture, self.error_rate))
        unseen = np.log(1 / self.error_rate) * self._longest
        return Sphere(centre, (spread + unseen) / self.count)


def squared_radius(scatter: np.ndarray, mixture: np.ndarray, error_rate: float) -> np.ndarray:
    """(…) (λ_max + κ)·(2·log(1/α) + log det(1 + V/κ)) of matrices (…, D, D), from above in many dimensions."""
    dimensions = scatter.shape[-1]
    if dimensions <= FEW_DIMENSIONS:
        eigenvalues = np.linalg.eigvalsh(scatter).clip(min=0.0)
        largest = eigenvalues[..., -1]
        volume = np.log1p(eigenvalues / mixture[..., None]).sum(axis=-1)
    else:
        largest = np.linalg.norm(scatter, axis=(-2, -1))
        trace = np.trace(scatter, axis1=-2, axis2=-1).clip(min=0.0)
        volume = dimensions * np.log1p(trace / (dimensions * mixture))
    return (largest + mixture) * (2 * np.log(1 / error_rate) + volume)


def tuned(covariance: np.ndarray, accuracy: float, error_rate: float) -> tuple[float, float]:
    """The mixture κ whose sphere has radius `accuracy` after the fewest samples, and their number.

    The covariance (D, D) comes from samples that are not used again; a wrong one costs samples, not validity.
    """
    largest = max(float(np.linalg.norm(covariance, 2)), 1e-12 * accuracy**2)
    squared = [float(squared_radius(covariance, np.asarray(k * largest), error_rate)) for k in MIXTURES]
    best = int(np.argmin(squared))
    samples = max(1.0, squared[best] / accuracy**2)
    return float(MIXTURES[best] * largest * samples), samples
