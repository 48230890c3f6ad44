"""Intervals over seeds: of means, and of geometric means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval (Student's t over seeds); of one value alone the interval is everything."""

    mean: float
    low: float
    high: float

    def mapped(self, function: Any) -> "Interval":
        """Through an increasing function: exp, of logarithms."""
        return Interval(*(function(value) for value in (self.mean, self.low, self.high)))

    def text(self, digits: int = 2) -> str:
        """Return `mean [low, high]` with so many digits."""
        mean, low, high = (f"{round(one, digits) + 0.0:.{digits}f}" for one in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]".replace("-", "−")


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the mean of independent values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    reach = t.ppf((1 + level) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return Interval(mean, float(mean - reach), float(mean + reach))


def geometric(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the geometric mean of positive values: what is skewed, as KLs are, is near normal in its logarithm."""
    return interval([math.log(value) for value in values], level).mapped(math.exp)
