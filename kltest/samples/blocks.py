"""Statistics of expected gradients, from n independent blocks of units: gradients at the logits, or their sketches.

Inner products of expectations are means over pairs of different blocks, which makes them unbiased: noise adds nothing
to a norm. Standard errors are those of the jackknife that leaves out one block at a time, with Student's quantiles. For
a mean over pairs their square is on average no smaller than the variance (Efron & Stein 1981).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]
# Blocks that are kept; with more, pairs of them are averaged.
MOST_BLOCKS = 64
# Directions of noise below this share of the largest are not fitted: their coefficients would be noise of their own.
SHARED = 1e-3
# A row whose variance is below this share of its square is a constant, up to rounding.
CONSTANT = 1e-12
# Numbers of a sketch that is folded again.
FOLDED = 4096
# Noise is heavy-tailed if fewer than this share of the blocks carry it: half of what carries it if it is normal.
HEAVY = 1 / 6


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Distance of the ends."""
        return self.high - self.low

    def named(self, name: str) -> dict[str, float]:
        """Return the numbers under a name, and under that with _low and _high behind it."""
        return {name: float(self.value), f"{name}_low": float(self.low), f"{name}_high": float(self.high)}


def reach(rate: float, blocks: float) -> float:
    """Standard errors on either side of an interval that misses with probability `rate`."""
    from scipy.special import stdtrit  # slow to import, and what is enumerated needs none

    return -float(stdtrit(blocks - 1, rate / 2))


class Blocks:
    """Means of equally many units, at most MOST_BLOCKS of them.

    Attributes:
        each: Units in a block.
        vectors: (n, Q, m) the blocks so far.
    """

    def __init__(self) -> None:
        self.each, self._filled, self._within = 1, 0, 0
        self._blocks = np.empty(0)
        self._partial: np.ndarray | float = 0.0

    def add(self, unit: np.ndarray) -> None:
        """Add the Q vectors (Q, m) of one unit."""
        if not self._filled and not self._within:
            # Memory is taken when a block is written.
            self._blocks = np.empty((MOST_BLOCKS, *unit.shape), unit.dtype)
        self._partial, self._within = self._partial + unit, self._within + 1
        if self._within < self.each:
            return
        if self._filled == MOST_BLOCKS:
            for half in range(MOST_BLOCKS // 2):
                self._blocks[half] = (self._blocks[2 * half] + self._blocks[2 * half + 1]) / 2
            self._filled, self.each = MOST_BLOCKS // 2, 2 * self.each
            return
        self._blocks[self._filled] = self._partial / self.each
        self._filled, self._partial, self._within = self._filled + 1, 0.0, 0

    @property
    def vectors(self) -> np.ndarray:
        """(n, m) means of the n blocks that are full."""
        return self._blocks[: self._filled]


@dataclass(frozen=True)
class Sample:
    """Vectors (n, Q, m) of Q gradients in n blocks, each the mean of as many independent units.

    `rank` is the share of the largest direction of noise below which controls are not fitted.
    """

    vectors: np.ndarray
    rank: float = SHARED

    def __len__(self) -> int:
        return len(self.vectors)

    def half(self, which: int) -> "Sample":
        """Every other block, from the first or from the second."""
        return replace(self, vectors=self.vectors[which::2])

    def controlled(self, controls: Sequence[int]) -> "Sample":
        """Fill row 1 with row 0 less its share of the controls, whose expectation is zero.

        The share is fitted on every other block and taken from the others, so that expectations stay as they are.
        """
        shares = [self.half(which).shares(controls) for which in (0, 1)]
        for number, block in enumerate(self.vectors):
            block[1] = block[0] - shares[1 - number % 2].astype(block.dtype) @ block[list(controls)]
        return replace(self)

    def shares(self, controls: Sequence[int]) -> np.ndarray:
        """(K,) coefficients of the controls in the least-squares fit of row 0's noise by that of all other rows."""
        own, _ = self._products
        noise = own.mean(0) - self.mean @ self.mean.T
        varies = np.diag(noise) > CONSTANT * np.diag(own.mean(0))
        scale = np.sqrt(np.maximum(np.diag(noise), 1e-300))
        noise = noise / scale / scale[:, None]
        rows = [row for row in range(2, len(noise)) if varies[row]]
        solved = np.zeros(len(noise))
        solved[rows] = np.linalg.lstsq(noise[np.ix_(rows, rows)], noise[rows, 0], rcond=self.rank)[0]
        found: np.ndarray = (solved * scale[0] / scale)[list(controls)]
        return found

    @cached_property
    def mean(self) -> np.ndarray:
        """(Q, m) mean sketches."""
        return np.stack([self.vectors[:, q].mean(0, dtype=np.float64) for q in range(self.vectors.shape[1])])

    @cached_property
    def _products(self) -> tuple[np.ndarray, np.ndarray]:
        """(n, Q, Q) inner products within each block, and of each block with the sum of all."""
        total = self.mean.T * len(self)
        blocks = (block.astype(np.float64) for block in self.vectors)
        pairs = [(block @ block.T, block @ total) for block in blocks]
        return np.stack([own for own, _ in pairs]), np.stack([others for _, others in pairs])

    @cached_property
    def products(self) -> np.ndarray:
        """(Q, Q) unbiased ⟨E x, E y⟩."""
        own, others = self._products
        found: np.ndarray = (others - own).sum(0) / (len(self) * (len(self) - 1))
        return (found + found.T) / 2

    @cached_property
    def without(self) -> np.ndarray:
        """(n, Q, Q) the same without one block each."""
        own, others = self._products
        n, rest = len(self), others - own
        found = (rest.sum(0) - rest - rest.transpose(0, 2, 1)) / ((n - 1) * (n - 2))
        return (found + found.transpose(0, 2, 1)) / 2

    @cached_property
    def noise(self) -> np.ndarray:
        """(Q, Q) covariance of the gradients of one block, its trace over weights."""
        own, _ = self._products
        found: np.ndarray = own.mean(0) - self.products
        return found

    @cached_property
    def _folded(self) -> np.ndarray:
        """(n, Q, k) the vectors folded again, enough for `pairs`."""
        n, rows, size = self.vectors.shape
        turns = -(-size // FOLDED)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=turns)
        found = np.zeros((n, rows, min(size, FOLDED)))
        for turn, sign in enumerate(signs):
            part = self.vectors[:, :, turn * FOLDED : (turn + 1) * FOLDED]
            found[:, :, : part.shape[2]] += sign * part
        return found

    def pairs(self, d: np.ndarray) -> float:
        """Standard error of the part of ‖E d‖² that is quadratic in noise, √(2·tr Cov(d)²/(n(n − 1))).

        All error is in that part if E d is zero; the jackknife's is then small just when ‖E d‖² comes out small.
        """
        return self.spread(d)[0]

    def spread(self, d: np.ndarray) -> tuple[float, float]:
        """Return `pairs`, and a bound on the variance of the mean of d along any direction: the largest eigenvalue of
        its covariance, or the root of the sum of their squares, whichever is estimated to be less."""
        n, each = len(self), np.einsum("nqk,q->nk", self._folded, d)
        products = (each - each.mean(0)) @ (each - each.mean(0)).T
        squares = (products**2).sum() - (np.diag(products) ** 2).sum()
        quadratic = math.sqrt(2 * squares) / (n * (n - 1))
        return quadratic, min(float(np.linalg.eigvalsh(products)[-1]) / (n * (n - 1)), quadratic / math.sqrt(2))

    def interval(self, statistic: Statistic, rate: float, more: float = 0.0) -> Interval:
        """A statistic of the inner products (…, Q, Q) with its interval; `more` is a standard error to add."""
        value, error = self.estimate(statistic)
        error = math.hypot(error, more)
        return Interval(value, value - reach(rate, len(self)) * error, value + reach(rate, len(self)) * error)

    def estimate(self, statistic: Statistic) -> tuple[float, float]:
        """A statistic of the inner products and its standard error; NaN where it is not defined."""
        with np.errstate(all="ignore"):
            value, each = float(statistic(self.products)), statistic(self.without)
        return value, math.sqrt((len(self) - 1) * float(np.var(each)))

    def effective(self, statistic: Statistic) -> float:
        """Number of blocks that carry a statistic's noise: (Σe²)²/Σe⁴ of its jackknife, n/3 if that is normal."""
        with np.errstate(all="ignore"):
            each = statistic(self.without)
            squares = (each - each.mean()) ** 2
            return float(squares.sum() ** 2 / (squares**2).sum())

    def skewness(self, statistic: Statistic) -> float:
        """Skewness of a statistic's noise, by its jackknife; 0 without noise."""
        with np.errstate(all="ignore"):
            each = statistic(self.without)
            away = each.mean() - each
            found = float((away**3).mean() / (away**2).mean() ** 1.5)
        return found if math.isfinite(found) else 0.0


def norm(x: np.ndarray) -> Statistic:
    """‖E x‖², for a combination x (Q,) of gradients."""
    return product(x, x)


def product(x: np.ndarray, y: np.ndarray) -> Statistic:
    """⟨E x, E y⟩."""
    return lambda products: products @ y @ x


def coefficient(x: np.ndarray, y: np.ndarray) -> Statistic:
    """⟨E x, E y⟩/⟨E y, E y⟩: c of the c·E y that is nearest to E x."""
    return lambda products: product(x, y)(products) / norm(y)(products)


def cosine(x: np.ndarray, y: np.ndarray) -> Statistic:
    """⟨E x, E y⟩/(‖E x‖·‖E y‖)."""
    return lambda products: product(x, y)(products) / np.sqrt(norm(x)(products) * norm(y)(products))


def fit(x: np.ndarray, columns: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """(…, K) coefficients of the combination of K gradients (K, Q) that is nearest to E x."""

    def solved(products: np.ndarray) -> np.ndarray:
        gram, right = columns @ products @ columns.T, products @ x @ columns.T
        found: np.ndarray = np.linalg.solve(gram, right[..., None])[..., 0]
        return found

    return solved


def misfit(x: np.ndarray, columns: np.ndarray) -> Statistic:
    """‖E x − fit‖²/‖E x‖²."""

    def share(products: np.ndarray) -> np.ndarray:
        explained = (fit(x, columns)(products) * (products @ x @ columns.T)).sum(-1)
        found: np.ndarray = 1 - explained / norm(x)(products)
        return found

    return share


def angle(sample: Sample, x: np.ndarray, y: np.ndarray, rate: float) -> Interval:
    """The cosine of E x and E y with its interval; near 1 it is 1 − ‖E rest‖²/2‖E x‖², with what y leaves of x."""
    products = sample.products
    rest = x - coefficient(x, y)(products) * y
    return sample.interval(cosine(x, y), rate, sample.pairs(rest) / (2 * float(abs(norm(x)(products)))))
