"""Intervals from independent units: prompts with their rollouts. Tokens and rollouts within one may depend on others.

An estimate is a function of means over units. Its standard error is that of the jackknife, its quantiles are Student's,
as in audits; the end on the side to which its noise is skewed is farther away by the first term of Edgeworth's
expansion, γ(2q² + 1)/(6√n) standard errors (Johnson 1978; Hall 1992).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kltest.samples.blocks import Interval, Sample, reach

LEAST = 8
"""Fewest units for an interval, and fewest that carry the noise of one that decides."""
MOST_INTERVALS = 40
"""Most intervals of a report; each misses with the error rate divided by this, so that all hold together."""
ROUNDING = 1e-9
"""Noise below this share of a value is rounding."""


@dataclass(frozen=True)
class Estimate(Interval):
    """An interval; `short` if it may be too short to decide, as too few units carry its noise."""

    short: bool = False

    def above(self, bound: float) -> bool:
        """Return whether it is surely above the bound."""
        return not self.short and self.low > bound

    def below(self, bound: float) -> bool:
        """Return whether it is surely below the bound."""
        return not self.short and self.high < bound

    def __str__(self) -> str:
        if not math.isfinite(self.low):
            return f"{self.value:.3g} [no interval]"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Units:
    """The units of N rollouts.

    Args:
        group: (N,) the unit of each rollout, counted from 0.
        error_rate: Highest probability that any interval of a report misses.
    """

    def __init__(self, group: np.ndarray, error_rate: float) -> None:
        self.group, self.rate, self.asked = group, error_rate / MOST_INTERVALS, 0

    def __len__(self) -> int:
        return int(self.group.max()) + 1

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums (n,) over the rollouts of each unit of numbers of rollouts (N,), or of their tokens (N, T)."""
        return np.bincount(self.group, weights=values if values.ndim == 1 else values.sum(axis=1))

    def estimate(self, statistic: Callable[..., np.ndarray], *sums: np.ndarray) -> Estimate:
        """Return a function of the means over units of sums (n,), with its interval."""
        self.asked += 1
        if len(self) < LEAST:
            with np.errstate(all="ignore"):
                value = float(statistic(*(one.mean() for one in sums)))
            return Estimate(value, -math.inf, math.inf, short=True)
        sample = Sample(np.stack([*sums, np.ones(len(self))], axis=1)[:, :, None])

        def of_means(products: np.ndarray) -> np.ndarray:
            return statistic(*(products[..., row, -1] for row in range(len(sums))))

        value, error = sample.estimate(of_means)
        q, skewness = reach(self.rate, len(self)), sample.skewness(of_means)
        more = abs(skewness) * (2 * q**2 + 1) / (6 * math.sqrt(len(self)))
        low, high = value - (q + more * (skewness < 0)) * error, value + (q + more * (skewness > 0)) * error
        noisy = error > ROUNDING * abs(value)
        short = not math.isfinite(error) or (noisy and sample.effective(of_means) < LEAST)
        return Estimate(value, low, high, short)

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
