"""A confidence sequence for the mean of vectors of bounded norm, by an empirical Bernstein inequality.

A sphere around an estimate contains the mean μ at every time, with probability at least 1 − α for the whole sequence,
so that sampling may stop at any time. In one dimension spheres are intervals; leading axes are independent streams.
Samples are a martingale difference sequence around μ: a sample may depend on earlier ones, as long as its mean, given
these, is μ. It is written out here, since scipy has intervals for one fixed sample size and one dimension.
"""

from typing import NamedTuple

import numpy as np

# Above 0.8 the vector-valued inequality is not proven.
LARGEST_BET = 0.8


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

    def __init__(self, bound: float, error_rate: float) -> None:
        self.bound = bound
        self.error_rate = error_rate
        self.count = 0
        self._bets = self._sum = self._penalty = self._total = self._squares = np.zeros(())

    def update(self, samples: np.ndarray, *, bound: float | None = None) -> None:
        """Add samples (n, …, D); bets and centre are those from before the call.

        `bound` is another largest norm, known before these samples were drawn.
        """
        bound = self.bound if bound is None else bound
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
