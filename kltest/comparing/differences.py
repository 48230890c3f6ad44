"""How far two calls of one batch are apart, and what explains all differences at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kltest.comparing.cases import Case, rollout
from kltest.comparing.sides import KL, Seen
from kltest.moments.tolerances import LOWEST_FIRST, TOLERANCES, Tolerances
from kltest.rollout import Rollout

AT_PADDING, LOGGED = "at padded positions", "logged "
OF_ONE = TOLERANCES["float32"].rows_absolute / TOLERANCES["float32"].rows


@dataclass(frozen=True)
class Difference:
    """One thing that differs: what it is, both numbers where they are furthest apart, and that place in words.

    `off` is the largest difference, relative to the largest number.
    """

    what: str
    a: float
    b: float
    off: float
    place: str = ""

    @property
    def at_padding(self) -> bool:
        """True for what stands at padded positions alone."""
        return AT_PADDING in self.what

    @property
    def words(self) -> str:
        """The difference in words."""
        return f"{self.what}{self.place} is {self.a:.9g} for A and {self.b:.9g} for B"


class Limit(NamedTuple):
    """How far apart equal numbers may be: relative to the largest, absolute, and relative for logged numbers."""

    share: float
    absolute: float
    logged: float = 0.0


def limits(case: Case, computes: Sequence[str], tolerance: float | None = None) -> Limit:
    """Return how far apart equal numbers may be on a batch, if losses compute in these types.

    It is what rounding in the narrowest type of the input costs, or in a narrower one in which both losses compute; a
    tolerance takes its place, but for inputs that are rounded more.
    """
    both = max(computes, key=LOWEST_FIRST.index)
    allowed = TOLERANCES[min(both, case.floats, key=LOWEST_FIRST.index)]
    limit = Limit(allowed.rows, allowed.rows_absolute, allowed.value)
    if tolerance is None:
        return limit
    least = Limit(0.0, limit.absolute) if case.floats == "float64" else limit
    # The absolute one is for terms of order 1 that cancel.
    return Limit(*(max(one, own) for one, own in zip((tolerance, tolerance * OF_ONE, tolerance), least, strict=True)))


def differences(case: Case, a: Seen, b: Seen, limit: Limit) -> list[Difference]:
    """Return what differs between two calls of a batch."""
    pairs = dict(_pairs(rollout(case), a, b))
    of_logged = limit._replace(share=limit.logged)
    found = [
        _difference(what, one, other, of_logged if what.startswith(LOGGED) else limit)
        for what, (one, other) in pairs.items()
    ]
    return [one for one in found if one is not None]


def _pairs(batch: Rollout, a: Seen, b: Seen) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    live = batch.peek("mask").numpy() != 0
    if a.returned != b.returned:
        yield "the objective", (np.array(a.objective), np.array(b.objective))
    elif a.returned == "tokens":
        yield "the value", (np.where(live, a.value, 0.0), np.where(live, b.value, 0.0))
        yield f"the value {AT_PADDING}", (np.where(live, 0.0, a.value), np.where(live, 0.0, b.value))
    else:
        yield "the value", (a.value, b.value)
    yield "the gradient", gradients(batch, a, b)
    for leaf in dict.fromkeys((*a.gradients, *b.gradients)):
        dead = ~(live if leaf == "logp" else live[..., None])
        zero = np.zeros_like((a.gradients if leaf in a.gradients else b.gradients)[leaf])
        one, other = (np.where(dead, each.gradients.get(leaf, zero), 0.0) for each in (a, b))
        yield f"the gradient {AT_PADDING} ({leaf})", (one, other)
    common = sorted(a.logged.keys() & b.logged.keys())
    for key in (key for key in common if key != KL or "kl" not in common):
        yield f"{LOGGED}{key}", (a.logged[key], b.logged[key])


def gradients(batch: Rollout, a: Seen, b: Seen) -> tuple[np.ndarray, np.ndarray]:
    """Return both gradients at live positions: at the log-probs if both use these alone, else at the logits."""
    live = batch.peek("mask").numpy() != 0
    if {*a.gradients, *b.gradients} <= {"logp"}:
        zero = np.zeros(live.shape)
        one, other = (np.where(live, each.gradients.get("logp", zero), 0.0) for each in (a, b))
        return one, other
    logits, live = np.where(live[..., None], batch.peek("logits").detach().numpy(), 0.0), live[..., None]
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    chosen = batch.peek("tokens").numpy()[..., None] == np.arange(logits.shape[-1])

    def at_logits(seen: Seen) -> np.ndarray:
        # Both leaves are made of the logits, the log-prob of a token from those of its position.
        whole = np.zeros(logits.shape)
        if "logits" in seen.gradients:
            whole += np.where(live, seen.gradients["logits"], 0.0)
        if "logp" in seen.gradients:
            whole += np.where(live, seen.gradients["logp"][..., None] * chosen, 0.0)
        return whole - p * whole.sum(axis=-1, keepdims=True)

    return at_logits(a), at_logits(b)


def _difference(what: str, one: np.ndarray, other: np.ndarray, limit: Limit) -> Difference | None:
    if one.shape != other.shape:
        return Difference(f"the shape of {what}", float(one.size), float(other.size), np.inf)
    with np.errstate(invalid="ignore"):
        gap = np.abs(one - other)
    gap = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.nan_to_num(gap, nan=np.inf))
    if not gap.size or not gap.max() > 0:
        return None
    numbers = np.abs(np.concatenate([one.ravel(), other.ravel()]))
    scale = float(numbers[np.isfinite(numbers)].max(initial=0.0))
    if gap.max() <= limit.share * scale + limit.absolute:
        return None
    at = np.unravel_index(gap.argmax(), gap.shape)
    place = f" at {', '.join(f'{name} {index}' for name, index in zip(PLACES, at, strict=False))}" if at else ""
    return Difference(what, float(one[at]), float(other[at]), float(gap.max()) / scale if scale else np.inf, place)


PLACES = ("row", "token", "action")


# What explains all of them


@dataclass(frozen=True)
class _Ratio:
    """B over A on one batch, None if it is not one number; B minus A, None if gradients differ; sizes of the batch."""

    times: float | None
    plus: float | None
    sizes: tuple[float, ...]


SIZED = ("the number of rows", "the number of tokens", "the width of the batch")


def ratio(case: Case, a: Seen, b: Seen, limit: Limit) -> _Ratio | None:
    """Compare two calls as multiples; None if nothing can be seen there: zeros, or numbers that are not finite."""
    batch = rollout(case)
    mask = batch.peek("mask").numpy()
    one, other = gradients(batch, a, b)
    vectors = [np.append(part.ravel(), seen.objective) for part, seen in ((one, a), (other, b))]
    if not all(np.isfinite(each).all() and np.abs(each).max() > Tolerances.guard for each in vectors):
        return None
    times = float(vectors[0] @ vectors[1] / (vectors[0] @ vectors[0]))
    proportional = _difference("", times * vectors[0], vectors[1], limit) is None
    equal = _difference("", one, other, limit) is None
    sizes = (float(len(mask)), float((mask != 0).sum()), float(mask.shape[1]))
    above = float(case.weights[0] if a.returned == "scalar" else case.weights.mean())
    return _Ratio(times if proportional else None, (b.objective - a.objective) / above if equal else None, sizes)


def explanation(ratios: Sequence[_Ratio], names: tuple[str, str] = ("A", "B")) -> str:
    """Return what one factor, or one summand, explains of all differences; "" if it does not explain all."""
    times, plus = [one.times for one in ratios], [one.plus for one in ratios]
    a, b = names
    if len(ratios) > 1 and (summand := _constant(plus)) is not None and abs(summand) > Tolerances.guard:
        return f"{b} is {a} plus {summand:.6g}; the gradients are equal"
    if len(ratios) < 2 or None in times:
        return ""
    if (factor := _constant(times)) is not None:
        return f"{b} is {a} times {factor:.6g}" if abs(factor - 1) > Tolerances.factor else ""
    for place, name in enumerate(SIZED):
        for word, power in (("divided by", 1), ("times", -1)):
            scaled = [(one.times or 0.0) * one.sizes[place] ** power for one in ratios]
            if (factor := _constant(scaled)) is not None:
                also = f" times {factor:.6g}," if abs(factor - 1) > Tolerances.factor else ""
                return f"{b} is {a}{also} {word} {name}"
    return ""


def _constant(numbers: Sequence[float | None]) -> float | None:
    given = [one for one in numbers if one is not None]
    if len(given) < len(numbers) or not given:
        return None
    middle = float(np.median(given))
    return middle if np.abs(np.array(given) - middle).max() <= Tolerances.factor * abs(middle) else None
