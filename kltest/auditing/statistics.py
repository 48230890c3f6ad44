"""Statistics of expected gradients, from sketches of n independent blocks of units.

Inner products of expectations are means over pairs of different blocks, which makes them unbiased: noise adds nothing
to a norm. Standard errors are those of the jackknife that leaves out one block at a time, with Student's quantiles. For
a mean over pairs their square is on average no smaller than the variance (Efron & Stein 1981).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.stats import t

Statistic = Callable[[np.ndarray], np.ndarray]
# A named gradient whose squared norm is within this many standard errors of zero has no direction.
WEAK = 4.0


class Interval(NamedTuple):
    """An estimate with the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def holds(self, number: float) -> bool:
        """True if a number lies in the interval."""
        return self.low <= number <= self.high


def reach(rate: float, blocks: int) -> float:
    """Standard errors on either side of an interval that misses with probability `rate`."""
    return float(t.ppf(1 - rate / 2, blocks - 1))


@dataclass(frozen=True)
class Sample:
    """Sketches (n, Q, m) of Q gradients in n blocks, each the mean of as many independent units."""

    vectors: np.ndarray

    def __len__(self) -> int:
        return len(self.vectors)

    def half(self, which: int) -> "Sample":
        """Every other block, from the first or from the second."""
        return Sample(self.vectors[which::2])

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

    def interval(self, statistic: Statistic, rate: float) -> Interval:
        """A statistic of the inner products (…, Q, Q) with its interval."""
        value, error = self.estimate(statistic)
        return Interval(value, value - reach(rate, len(self)) * error, value + reach(rate, len(self)) * error)

    def estimate(self, statistic: Statistic) -> tuple[float, float]:
        """A statistic of the inner products and its standard error; NaN where it is not defined."""
        with np.errstate(all="ignore"):
            value, each = float(statistic(self.products)), statistic(self.without)
        return value, math.sqrt((len(self) - 1) * float(np.var(each)))


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


@dataclass(frozen=True)
class Distance:
    """Bounds on ‖E d‖ as a share of ‖E t‖, at one error rate together."""

    value: float
    low: float
    high: float


def distance(sample: Sample, d: np.ndarray, unit: np.ndarray, named: np.ndarray, rate: float) -> Distance:
    """Bound ‖E d‖/‖E unit‖ from both sides.

    From above by ‖E d‖², a mean over pairs: around a small ‖E d‖ it is no normal variable, but a weighted sum of χ²
    variables, whose lower tail is below exp(−s²/2) at s standard deviations (Laurent & Massart 2000, Lemma 1; Birgé
    2001 off zero). From below by cross-fitting: a direction w from one half of the blocks, and Student's interval of
    ⟨d, w⟩ over the other half, which is an ordinary mean; ‖E d‖ ≥ ⟨E d, w⟩ for any w of norm 1. Both halves serve in
    turn, with two directions each: the mean of d, and the nearest combination of the `named` gradients (K, Q), which
    has less noise.
    """
    square, error = sample.estimate(norm(d))
    units = sample.interval(norm(unit), rate / 4)
    most = max(square + error * max(math.sqrt(2 * math.log(4 / rate)), reach(rate / 2, len(sample))), 0.0)
    lows = [0.0]
    for own, other in ((0, 1), (1, 0)):
        learn, test = sample.half(own), sample.half(other)
        for direction in _directions(learn, d, named):
            if (length := float(np.linalg.norm(direction))) > 0:
                along = np.einsum("nqm,q,m->n", test.vectors, d, direction / length, optimize=True)
                margin = float(t.ppf(1 - rate / 16, len(test) - 1)) * along.std(ddof=1) / math.sqrt(len(test))
                lows.append(float(along.mean() - margin))
    least, largest = math.sqrt(max(units.low, 0.0)), math.sqrt(max(units.high, 1e-300))
    value = math.sqrt(max(square, 0.0) / max(units.value, 1e-300))
    return Distance(value, max(lows) / largest, math.sqrt(most) / least if least else math.inf)


def _directions(learn: Sample, d: np.ndarray, named: np.ndarray) -> list[np.ndarray]:
    found = [d @ learn.mean]
    scale = np.sqrt(np.maximum(np.einsum("kq,qp,kp->k", named, learn.products, named), 0.0))
    kept = named[scale > 0] / scale[scale > 0, None]
    if len(kept):
        gram, right = kept @ learn.products @ kept.T, kept @ learn.products @ d
        found.append(np.linalg.lstsq(gram, right, rcond=1e-3)[0] @ kept @ learn.mean)
    return found


@dataclass(frozen=True)
class Combination:
    """A short combination near E x, with an interval for each coefficient.

    `misfit` is ‖E x − fit‖/‖E x‖; `rivals` are other combinations of as many names that are not surely farther.
    """

    terms: dict[str, Interval]
    misfit: Interval
    rivals: tuple[tuple[str, ...], ...] = ()


def nearest(
    sample: Sample, x: np.ndarray, names: dict[str, np.ndarray], rate: float, margin: float
) -> Combination | None:
    """Return the combination of the fewest names that E x may be: one, or two if each alone is surely too far.

    Which of two combinations is nearer depends on ⟨E x, E y⟩ alone, not on the noisier ‖E x‖: they are compared with
    each other. The nearest is returned, with those that cannot be told apart from it as `rivals`.

    Args:
        sample: The sketches.
        x: (Q,) the gradient in question.
        names: Named gradients (Q,) in the order of preference, none of them zero.
        rate: Error rate of all that is said.
        margin: A misfit surely beyond this share of ‖E x‖ is too far.
    """
    found = None
    for terms in (1, 2):
        fits = {one: np.stack([names[name] for name in one]) for one in combinations(names, terms)}
        found = _nearest(sample, x, fits, rate / 2) or found
        if found is None or found.misfit.low <= margin:
            return found
    return found


def _nearest(sample: Sample, x: np.ndarray, fits: dict[tuple[str, ...], np.ndarray], rate: float) -> Combination | None:
    """The nearest of several combinations, and those that are not surely farther; None if none is defined."""
    try:
        values = {one: sample.estimate(misfit(x, columns)) for one, columns in fits.items()}
    except np.linalg.LinAlgError:
        return None
    values = {one: value for one, value in values.items() if all(map(math.isfinite, value))}
    if not values:
        return None
    best = min(values, key=lambda one: values[one][0])
    each, parts = rate / (2 * len(values)), rate / (2 * (len(best) + 1))

    def farther(one: tuple[str, ...]) -> bool:
        own, other = misfit(x, fits[best]), misfit(x, fits[one])
        return sample.interval(lambda products: other(products) - own(products), each).low > 0

    def term(k: int) -> Interval:
        solved = fit(x, fits[best])
        return sample.interval(lambda products: solved(products)[..., k], parts)

    square = sample.interval(misfit(x, fits[best]), parts)
    return Combination(
        {name: term(k) for k, name in enumerate(best)},
        Interval(*(math.sqrt(max(number, 0.0)) for number in square)),
        tuple(one for one in values if one != best and not farther(one)),
    )
