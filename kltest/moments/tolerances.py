"""Tolerances by dtype: the one table of how far numbers that should be equal may be apart.

A loss computes in float64 unless it converts what it is given; `Moments.dtype` and `Observed.dtype` name the lowest
precision that was seen on its way. Neighbouring numbers near 1 are apart by 2⁻⁵² = 2.2e-16 in float64, 1.2e-7 in
float32, 9.8e-4 in float16 and 7.8e-3 in bfloat16; every number below is that, times room for the sums and
cancellations of the comparison it is for, and far below the effects that the comparison is after.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tolerances:
    """Bounds for a loss that computes in one dtype; relative to the larger number unless said otherwise.

    Attributes:
        rows: A row's gradient in a batch and alone, and other gradients of equal rows: some hundred roundings.
        rows_absolute: Added to it, absolute: what rounding leaves of terms of order 1 that cancel.
        repeated: The same batch, called again. torch may add up in another order when memory lies otherwise; nothing
            else may differ.
        identified: Residuals of a fit by named gradients, tried in this order. The first is rounding alone. In float64
            a second one allows for a small constant in a denominator (1e-8 is usual); the residual is reported.
        zero: An expected gradient below this share of the root mean square of one rollout's gradient is zero: what is
            left of a sum that cancels.
        zero_in_units: An expected gradient below this share of ‖∇KL(π‖ref)‖ is zero, if single gradients are
            rounding already.
        terms: The most named gradients in a fit. In half precision two or three of them fit almost anything.
        influence: A gradient before and after the sampler's log-probs changed.
        groups: Gradients of groups that should not differ, or should be zero.
        proportional: What β adds to a gradient at two values of β, after each is divided by its β.
        value: A logged number and the KL it may be. Such a number often passes through float32 whatever the loss
            computes in, and is divided by a count to which a small constant was added; what is told apart differs by
            more than 1e-2.
        search: What a fit may leave after a numerical search, which stops at about 1e-8; 0 means that no fit counts.
        head: Gradients at single logits before and after other logits changed.
        narrow: A half-precision loss and float64 on the same numbers. Plain losses stay below 0.03 in bfloat16 and
            0.004 in float16, sums that are subtracted only at the end (as in DPO) below 0.075 and 0.012; beyond three
            times that, digits were thrown away. None: the dtype is not narrow.
        log_ratio: The smallest log-ratio, absolute, that is not lost when log-probs are rounded.
        far: An expected gradient and the declared one if policy and reference are far apart, or sure of a token: a
            constant of 1e-8 beside a probability of e⁻¹² makes less than a thousandth. In half precision digits are
            what differs most: as `narrow`.
        far_sampler: The same if the sampler is far from the policy: 1e-8 beside the sampler's probability makes less
            than that at a log-ratio of 10.
        summed: An expected gradient and the declared one where log-probs of whole rollouts, of −1,000 and less, are
            subtracted only at the end. None: nothing is left of such a difference.
        guard: Difference that a small constant makes in a denominator, as in sum(x·mask)/(sum(mask) + 1e-6). It has
            nothing to do with the dtype: `Tolerances.guard`.
        factor: A coefficient and the one that it may be, such as one half, whatever the dtype: `Tolerances.factor`.
    """

    rows: float
    rows_absolute: float
    repeated: float
    identified: tuple[float, ...]
    zero: float
    zero_in_units: float
    terms: int
    influence: float
    groups: float
    proportional: float
    value: float
    search: float
    head: float
    narrow: float | None
    log_ratio: float
    far: float
    far_sampler: float
    summed: float | None
    guard: float = 1e-5
    factor: float = 1e-3

    @property
    def gradient(self) -> float:
        """A measured expected gradient and the declared one: as far apart as an identified one may be from its fit."""
        return self.identified[-1]


LOWEST_FIRST = ("averaged", "float16", "bfloat16", "float32", "float64")
"""In the order of precision of a result; float16 underflows where bfloat16 does not, and a mean over random draws
(kltest.moments.averaged) has noise of some hundredths whatever it is computed in."""

_COLUMNS: dict[str, tuple[Any, ...]] = {
    # averaged, float16, bfloat16, float32, float64
    "rows": (2.5e-1, 2e-2, 1e-1, 1e-4, 1e-9),
    "rows_absolute": (5e-2, 1e-2, 1e-1, 1e-5, 1e-14),
    "repeated": (1e-1, 1e-2, 1e-1, 1e-6, 1e-12),
    "identified": ((1e-1,), (3e-3,), (2e-2,), (1e-4,), (1e-9, 1e-7)),
    "zero": (5e-2, 4e-4, 3e-3, 1e-6, 1e-11),
    "zero_in_units": (1e-1, 5e-3, 3e-2, 1e-5, 1e-12),
    "terms": (1, 1, 1, 3, 3),
    "influence": (1e-1, 1e-2, 1e-2, 1e-5, 1e-10),
    "groups": (1e-1, 5e-2, 5e-2, 1e-4, 1e-9),
    "proportional": (1e-1, 5e-2, 5e-2, 1e-2, 1e-6),
    "value": (1e-1, 3e-2, 3e-2, 1e-4, 1e-4),
    "search": (0.0, 0.0, 0.0, 1e-4, 1e-6),
    "head": (1e-1, 1e-3, 1e-3, 1e-6, 1e-10),
    "narrow": (None, 0.04, 0.25, None, None),
    "log_ratio": (0.05, 0.01, 0.05, 0.0, 0.0),
    "far": (1e-1, 0.04, 0.25, 1e-2, 1e-2),
    "far_sampler": (1e-1, 0.04, 0.25, 1e-3, 1e-3),
    "summed": (1e-1, None, None, 1e-2, 1e-9),
}
TOLERANCES = {
    dtype: Tolerances(**{name: column[index] for name, column in _COLUMNS.items()})
    for index, dtype in enumerate(LOWEST_FIRST)
}


def near(found: np.ndarray, expected: np.ndarray, dtype: str) -> bool:
    """True if two arrays agree up to rounding, relative to the largest entry."""
    scale = max(np.abs(found).max(initial=0.0), np.abs(expected).max(initial=0.0))
    allowed = TOLERANCES[dtype]
    return bool(np.abs(found - expected).max(initial=0.0) <= allowed.rows * scale + allowed.rows_absolute)


def near_rows(found: np.ndarray, expected: np.ndarray, dtype: str) -> bool:
    """True if each row of two arrays agrees up to rounding, relative to the row's largest entry."""
    if not found.size:
        return True
    found, expected = found.reshape(len(found), -1), expected.reshape(len(expected), -1)
    scale = np.maximum(np.abs(found).max(axis=1), np.abs(expected).max(axis=1))
    allowed = TOLERANCES[dtype]
    return bool((np.abs(found - expected).max(axis=1) <= allowed.rows * scale + allowed.rows_absolute).all())


def close(own: tuple[np.ndarray, ...], part: tuple[np.ndarray, ...], dtype: str, factor: float = 1.0) -> bool:
    """True if two gradients agree, leaf by leaf, once the second is multiplied by `factor`."""
    if len(own) != len(part):
        return not any(array.any() for array in (*own, *part))
    return all(near(factor * b, a, dtype) for a, b in zip(own, part, strict=True))
