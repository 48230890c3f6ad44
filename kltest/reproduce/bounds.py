"""Bounds that a claim holds what it measured to: each can be tested, and written in a sentence or as an inequality."""

import math
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bound:
    """Numbers between two limits, or as near to one as stated. Called with values it tells which of them are."""

    low: float = -math.inf
    high: float = math.inf
    closed: bool = False
    near: float | None = None

    def __call__(self, values: Any) -> Any:
        if self.near is not None:
            return abs(values - self.near) < self.high
        if self.closed:
            return (self.low <= values) & (values <= self.high)
        return (values > self.low) & ((values < self.high) | (values == math.inf) & math.isinf(self.high))

    def __format__(self, spec: str) -> str:
        """Write its numbers, as in a sentence; with ± before the format that which it may be off by."""
        if spec.startswith("±"):
            return figure(self.high, spec[1:] or ".8g")
        limits = [self.near] if self.near is not None else [one for one in (self.low, self.high) if math.isfinite(one)]
        return " to ".join(figure(one, spec or ".8g") for one in dict.fromkeys(limits))

    def of(self, name: str) -> str:
        """Write the inequality for a quantity of this name."""
        if self.near is not None:
            return (
                f"|{name} − {figure(self.near)}| < {figure(self.high)}"
                if self.near
                else f"|{name}| < {figure(self.high)}"
            )
        if self is EVERY:
            return f"{name}: in every case"
        if self.low == self.high:
            return f"{name} = {figure(self.low)}"
        less, more = ("≤", "≥") if self.closed else ("<", ">")
        if math.isinf(self.high):
            return f"{name} {more} {figure(self.low)}"
        left = f"{figure(self.low)} {less} " if math.isfinite(self.low) else ""
        return f"{left}{name} {less} {figure(self.high)}"


def below(limit: float) -> Bound:
    """Return the bound x < limit."""
    return Bound(high=limit)


def above(limit: float) -> Bound:
    """Return the bound x > limit."""
    return Bound(low=limit)


def at_most(limit: float) -> Bound:
    """Return the bound x ≤ limit."""
    return Bound(high=limit, closed=True)


def at_least(limit: float) -> Bound:
    """Return the bound x ≥ limit."""
    return Bound(low=limit, closed=True)


def within(low: float, high: float) -> Bound:
    """Return the bound low < x < high."""
    return Bound(low, high)


def exactly(value: float) -> Bound:
    """Return the bound x = value."""
    return Bound(value, value, closed=True)


def near(value: float, tolerance: float) -> Bound:
    """Return the bound |x − value| < tolerance."""
    return Bound(near=value, high=tolerance)


# Bound of truth values, each of which has to be true.
EVERY = Bound(True, True, closed=True)


def figure(value: float, spec: str = ".8g") -> str:
    """Write a number, with a minus and without the zeros of its exponent."""
    return re.sub(r"e([+-])0(?=\d)", r"e\1", format(value, spec)).replace("e+", "e").replace("-", "−")
