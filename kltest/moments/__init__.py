"""Moments of the gradient of any loss: enumerated, over batches, by dynamic programming, of any module."""

from kltest.moments.batches import exact_batches, exact_batches_each
from kltest.moments.caller import BatchOfOneError
from kltest.moments.dynamic_programming import Expected, dynamic
from kltest.moments.enumeration import exact
from kltest.moments.moments import Expectation, Moments
from kltest.moments.reduction import NonDeterministicError

__all__ = [
    "BatchOfOneError",
    "Expectation",
    "Expected",
    "Moments",
    "NonDeterministicError",
    "dynamic",
    "exact",
    "exact_batches",
    "exact_batches_each",
]
