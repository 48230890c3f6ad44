"""Exact moments of the gradient of any loss: by enumeration, over batches, by dynamic programming, for any module."""

from kltest.moments.batches import exact_batches
from kltest.moments.exact import exact
from kltest.moments.moments import Expectation, Moments
from kltest.moments.reduction import BatchOfOneError

__all__ = ["BatchOfOneError", "Expectation", "Moments", "exact", "exact_batches"]
