"""Intervals from independent units: prompts with their rollouts. Tokens and rollouts within one may depend on others.

An estimate is a function of means over units, and its standard error that of the jackknife, as in audits. Two terms
make up for noise that is not normal. The degrees of freedom of Student's quantile are those of a variance estimated
from n numbers of kurtosis κ, 2n/(κ − 1); few are left where a few units carry the noise. The end on the side to which
noise is skewed is farther away by the first term of Edgeworth's expansion, γ(2q² + 1)/(6√n) standard errors.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kltest.samples.blocks import Interval, Sample, reach

LEAST = 8
"""Fewest units for an interval."""
MOST_INTERVALS = 30
"""Most intervals of a report; each misses with the error rate divided by this, so that all hold together."""
ROUNDING = 1e-9
"""Noise below this share of a value is rounding."""
SHOWN = 1e-4
"""Width of an interval, as a share of its value, below which its ends are not printed."""


class Estimate(Interval):
    """An interval as text, with as many decimals as it settles."""

    def __str__(self) -> str:
        if not math.isfinite(self.width):
            return f"{self.value:.3g} [no interval]"
        if self.width <= SHOWN * abs(self.value):
            return f"{self.value:.4g}"
        digits = max(0, 1 - math.floor(math.log10(self.width)))
        if digits > 5:
            return f"{self.value:.2g} [{self.low:.2g}, {self.high:.2g}]"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


class Units:
    """The units of N rollouts.

    Args:
        group: (N,) the unit of each rollout, counted from 0.
        rate: Highest probability that an interval misses.
    """

    def __init__(self, group: np.ndarray, rate: float) -> None:
        self.group, self.rate = group, rate

    def __len__(self) -> int:
        return int(self.group.max()) + 1

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums (n,) over each unit of numbers of rollouts (N,), or of tokens (N, T)."""
        return np.bincount(self.group, weights=values if values.ndim == 1 else values.sum(axis=1))

    def estimate(self, statistic: Callable[..., np.ndarray], *sums: np.ndarray) -> Estimate:
        """Return a function of the means over units of sums (n,), with its interval."""
        if len(self) < LEAST:
            with np.errstate(all="ignore"):
                value = float(statistic(*(one.mean() for one in sums)))
            return Estimate(value, -math.inf, math.inf)
        sample = Sample(np.stack([*sums, np.ones(len(self))], axis=1)[:, :, None])

        def of_means(products: np.ndarray) -> np.ndarray:
            return statistic(*(products[..., row, -1] for row in range(len(sums))))

        value, error = sample.estimate(of_means)
        if not math.isfinite(error):
            return Estimate(value, -math.inf, math.inf)
        if error <= ROUNDING * abs(value):
            return Estimate(value, value - error, value + error)
        n, skewness = len(self), sample.skewness(of_means)
        freedom = min(n - 1.0, 2 * n / max(n / sample.effective(of_means) - 1, ROUNDING))
        q = reach(self.rate, freedom + 1)
        more = abs(skewness) * (2 * q**2 + 1) / (6 * math.sqrt(n))
        return Estimate(value, value - (q + more * (skewness < 0)) * error, value + (q + more * (skewness > 0)) * error)

    def mean(self, values: np.ndarray, weights: np.ndarray | None = None, *, unseen: bool = False) -> Estimate:
        """Return E Σ values/E Σ weights, for numbers of rollouts (N,) or of tokens (N, T); without weights E values.

        `unseen`: the values have no largest; the upper end is moved by what was not seen, as far as rare values like
        the largest that was seen would move it.
        """
        sums, counts = self.sums(values), self.sums(np.ones(len(values)) if weights is None else weights)
        found = self.estimate(lambda one, count: one / count, sums, counts)
        if unseen:
            largest = float((sums - found.value * counts).max() / counts.mean())
            return replace(found, high=found.high + largest * math.log(1 / self.rate) / len(self))
        return found
