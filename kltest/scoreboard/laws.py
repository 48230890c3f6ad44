"""Laws: how the coefficients of a gradient change with the sizes of rollouts and batches.

A law, 1/T or (1 − 1/B)/T, is found by measuring, never guessed. The loss is called on sequences over two tokens, of one
size after another: the length of the rollouts, the padded columns, the rows of a batch or a group, or an option that is
a length. A law is reported if it fits at three sizes or more, exactly. Batches that are too large to enumerate are the
subject of `limits`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, product
from typing import Any, Literal

import numpy as np

from kltest.counterexample.environment import measure
from kltest.environments import Instance, sequence
from kltest.errors import KltestError
from kltest.identify.identification import independent
from kltest.identify.instances import with_ties
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.moments import exact_batches
from kltest.scoreboard.rows import REWARDED
from kltest.truth import gradient, support_named

TOKENS, WIDTH = "T", "padded width"
# Options of libraries that are lengths, and values that they take in turn.
OPTIONS, VALUES = ("max_completion_length",), (2, 5, 7)
LENGTHS, WIDER, ROWS = (1, 2, 3, 4), (1, 3), (1, 2, 3, 4)
SEED = 5
# Tokens of the rollouts that show if rows are added up.
SHORT = 2
# Most calls of single batches at one size.
MOST = 300
# Sizes at which a law has to fit.
LEAST = 3
# Relative: on what a combination leaves of a gradient, and on coefficients.
NEAR = {"float64": 1e-7}
ROUGH = 2e-3
Shape = Callable[[float], float]
SHAPES: Mapping[str, Shape] = {"1/{q}": lambda size: 1 / size, "(1 − 1/{q})": lambda size: 1 - 1 / size}
Sizes = dict[str, float]
Sampler = Literal["current", "stale"]


def laws(
    build: Callable[[Mapping[str, Any]], Loss],
    identified: Mapping[str, float],
    sampler: Sampler,
    batch: int,
    dtype: str,
    rows: str = "",
) -> dict[str, str]:
    """Return the laws of those coefficients of a gradient of sequences that follow one.

    Args:
        build: returns the loss with further arguments; raises KltestError if it does not take them.
        identified: the gradient that it follows where all rollouts have three tokens.
        sampler: whose rollouts they are.
        batch: rows of a batch in which it follows that.
        dtype: the precision in which it computes.
        rows: what the rows of a batch are called, BATCH or GROUP, if the loss couples them.

    Returns:
        By name: "1/T", "-1/(T·B)", "1/max_completion_length" …; names without a law are missing.
    """
    near = NEAR.get(dtype, ROUGH)
    moving = [name for name, coefficient in identified.items() if abs(coefficient - 1) > near]
    if not moving or "zero" in identified:
        return {}
    found: dict[str, str] = {}
    for quantities, points in _series(build, tuple(identified), sampler, batch, near, rows):
        for name in moving:
            law = _law(quantities, [(sizes, each[name]) for sizes, each in points], near)
            if law and name not in found:
                found[name] = law
        if found.keys() >= set(moving):
            break
    return found


def _series(
    build: Callable[[Mapping[str, Any]], Loss],
    names: tuple[str, ...],
    sampler: Sampler,
    batch: int,
    near: float,
    rows: str,
) -> Iterator[tuple[tuple[str, ...], list[tuple[Sizes, dict[str, float]]]]]:
    """Yield quantities that were varied, and coefficients by the sizes at which they were measured."""

    def at(length: int, *, columns: int = 0, many: int = batch, **option: int) -> tuple[Sizes, dict[str, float] | None]:
        sizes: Sizes = {TOKENS: length, WIDTH: length + columns, rows: many, **option}
        with suppress(KltestError):  # it takes no batch of that size, or no such option
            return sizes, _coefficients(build(option), names, sampler, (length, columns, many), near, summed)
        return sizes, None

    def few(length: int, many: int) -> bool:
        return vocabulary(names) ** (length * many) <= MOST

    summed = bool(rows) and _adds_up(build({}), names, sampler, max(batch, 2))
    lengths = [partial(at, length) for length in LENGTHS if few(length, batch)]
    lengths += [partial(at, 2, columns=more) for more in WIDER]
    # A batch of one that has a law of its own is no batch of several.
    several = [(length, many) for length, many in product(LENGTHS, ROWS) if many > batch and few(length, many)]
    series: list[tuple[tuple[str, ...], list[Any]]] = [((TOKENS, WIDTH), lengths)]
    series += [((option,), [partial(at, 2, **{option: value}) for value in VALUES]) for option in OPTIONS]
    if rows:
        more = [partial(at, length, many=many) for length, many in several]
        series.insert(0, ((TOKENS, WIDTH, rows), lengths + more))
    for quantities, calls in series:
        points = [call() for call in calls]
        yield quantities, [(sizes, found) for sizes, found in points if found is not None]


def _coefficients(
    loss: Loss, names: tuple[str, ...], sampler: Sampler, size: tuple[int, int, int], near: float, summed: bool
) -> dict[str, float] | None:
    """Coefficients of a loss's gradient in small sequences; None if names depend on each other, or miss it."""
    length, columns, rows = size
    instance = _drawn(names, length)
    known = {name: gradient(name, instance).ravel() for name in names}
    if len(independent(known)) < len(names):
        return None
    with preserved(SEED):
        found = measure(loss, instance, sampler, rows, summed=summed, columns=columns)[0].ravel()
    matrix = np.stack(list(known.values()), axis=1)
    fit = np.linalg.lstsq(matrix, found, rcond=None)[0]
    if np.linalg.norm(matrix @ fit - found) > near * np.linalg.norm(found):
        return None
    return dict(zip(names, map(float, fit), strict=True))


def _drawn(names: Iterable[str], length: int) -> Instance:
    """An instance of rollouts of one length, with rewards of 0 and 1 if the gradient is the reward's."""
    instance = Instance.draw(sequence(vocabulary(names), length), SEED)
    return with_ties(instance, SEED) if set(names) == {REWARDED[1]} else instance


def _adds_up(loss: Loss, names: tuple[str, ...], sampler: Sampler, batch: int) -> bool:
    """True if a loss adds the rows of a batch up: its gradient is divided by their number, as in grading."""
    instance = _drawn(names, SHORT)
    with suppress(KltestError), preserved(SEED):
        return exact_batches(loss, instance, sampler, batch, logs=False).added_up
    return False


def vocabulary(names: Iterable[str]) -> int:
    """Return how many tokens tell gradients apart: two, and two more than a support has."""
    supports = [support_named(name.partition("@")[0]) for name in names]
    return max((one.k + 2 for one in supports if one), default=2)


def _law(quantities: Sequence[str], points: list[tuple[Sizes, float]], near: float) -> str:
    """The law of a coefficient in one quantity or in two that fits all points; "" if none does, or if it is constant.

    A quantity that a law does not name has to have been varied without any change.
    """
    single = [(quantity,) for quantity in quantities]
    for chosen in [*single, *combinations([one for one in quantities if one != WIDTH], 2)]:
        for words in product(SHAPES, repeat=len(chosen)):
            kept = [
                (sizes, c, math.prod(SHAPES[w](sizes[q]) for w, q in zip(words, chosen, strict=True)))
                for sizes, c in points
            ]
            nonzero = [sizes for sizes, _, weight in kept if weight]
            if any(len({sizes[quantity] for sizes in nonzero}) < LEAST for quantity in chosen):
                continue
            first = next(c / weight for _, c, weight in kept if weight)
            if first and all(abs(c - first * weight) <= near * abs(first) for _, c, weight in kept):
                return _words(first, [word.format(q=q) for word, q in zip(words, chosen, strict=True)])
    return ""


def _words(first: float, factors: Sequence[str]) -> str:
    """A law as text: -1/(T·B), (1 − 1/B)/T, 0.5/T."""
    below = [each.removeprefix("1/") for each in factors if each.startswith("1/")]
    above = [each for each in factors if not each.startswith("1/")]
    number = f"{first:.4g}"
    number = {"1": "", "-1": "-"}.get(number, f"{number}·") if above else number
    bottom = f"/({'·'.join(below)})" if len(below) > 1 else f"/{below[0]}" if below else ""
    return number + "·".join(above) + bottom
