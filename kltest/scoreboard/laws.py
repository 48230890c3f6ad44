"""Measurements beside a report: laws of coefficients, and if the sampler's log-probs enter the KL term.

A law, 1/T or 1/max_completion_length, is found by measuring, never guessed. The loss is called on sequences over two
tokens, of one size after another: the length of the rollouts, the padded columns, the rows of a group, or an option
that is a length. A law is reported if it fits at three sizes or more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from kltest.counterexample.environment import measure
from kltest.environments import Instance, sequence
from kltest.errors import KltestError
from kltest.grading.isolated import Child
from kltest.grading.jobs import Job
from kltest.identify.identification import independent
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.report import Report
from kltest.rollout import SAMPLER_FIELDS
from kltest.truth import gradient, support_named

TOKENS, WIDTH, GROUP = "T", "padded width", "group size"
# Options of libraries that are lengths, and values that they take in turn.
OPTIONS, VALUES = ("max_completion_length",), (2, 5, 7)
LENGTHS, WIDER, GROUPS = (1, 2, 3, 4), (1, 3), (2, 3, 4)
SEED = 5
# Most calls of single batches at one size.
MOST = 300
# Sizes at which a law has to fit.
LEAST = 3
# Relative: on what a combination leaves of a gradient, and on coefficients.
NEAR = {"float64": 1e-7}
ROUGH = 2e-3
SHAPES: Mapping[str, Callable[[float], float]] = {
    "{a}/{q}": lambda size: 1 / size,
    "{a}·(1 − 1/{q})": lambda size: 1 - 1 / size,
}
Sizes = dict[str, float]
Sampler = Literal["current", "stale"]
# For all measurements beside a report.
SECONDS = 300.0


def extras(job: Job, report: Report) -> dict[str, Any]:
    """Return fields of a row: laws of coefficients by name, and if the sampler's log-probs move the gradient.

    They are measured in a child of this process. A loss that ends it, or that was not graded, has none of it.
    """
    found: dict[str, Any] = {"laws": {}, "reads_sampler": False}
    if report.gradients:
        with Child(_extras, job, report) as child:
            step = child.step(SECONDS)
        found |= step.value if step.kind == "value" else {}
    return found


def _extras(job: Job, report: Report) -> Iterator[dict[str, Any]]:
    import torch

    from kltest.checks.off_policy.ratios import sampler_has_influence
    from kltest.grading.grader import plan
    from kltest.grading.options import Options
    from kltest.identify.graded import kl_part
    from kltest.loss.resolve import resolve

    torch.set_num_threads(1)
    options = Options(**job.given)

    def build(arguments: Mapping[str, Any]) -> Loss:
        mine = replace(options, arguments={**options.arguments, **arguments})
        return kl_part(resolve(job.target, mine.call), mine.expect, mine.seed, mine.group_size)

    found: dict[str, str] = {}
    # A law of the smallest batch is that of a rollout.
    for each in sorted(report.gradients, key=lambda row: row.batch):
        if each.environment == "sequence" and each.identified:
            found = laws(build, each.identified, each.sampler, each.batch, report.dtype) | found  # type: ignore[arg-type]
    findings = plan(build({}), options)
    taken = findings.observed.uses & SAMPLER_FIELDS
    try:
        moves = taken and sampler_has_influence(findings, "sequence")
    except KltestError:
        moves = taken
    yield {"laws": found, "reads_sampler": bool(moves)}


def laws(
    build: Callable[[Mapping[str, Any]], Loss],
    identified: Mapping[str, float],
    sampler: Sampler,
    batch: int,
    dtype: str,
) -> dict[str, str]:
    """Return the laws of those coefficients of a gradient of sequences that follow one.

    Args:
        build: returns the loss with further arguments; raises KltestError if it does not take them.
        identified: the gradient that it follows where all rollouts have three tokens.
        sampler: whose rollouts they are.
        batch: rows of a batch in which it follows that.
        dtype: the precision in which it computes.

    Returns:
        By name: "1/T", "1/max_completion_length" …; names without a law are missing.
    """
    near = NEAR.get(dtype, ROUGH)
    moving = [name for name, coefficient in identified.items() if abs(coefficient - 1) > near]
    if not moving or "zero" in identified:
        return {}
    found: dict[str, str] = {}
    for quantities, points in _series(build, tuple(identified), sampler, batch, near):
        for name in moving:
            law = _law(quantities, [(sizes, each[name]) for sizes, each in points], near)
            if law and name not in found:
                found[name] = law
        if found.keys() >= set(moving):
            break
    return found


def _series(
    build: Callable[[Mapping[str, Any]], Loss], names: tuple[str, ...], sampler: Sampler, batch: int, near: float
) -> Iterator[tuple[tuple[str, ...], list[tuple[Sizes, dict[str, float]]]]]:
    """Yield quantities that were varied, and coefficients by the sizes at which they were measured."""

    def at(length: int, *, columns: int = 0, rows: int = batch, **option: int) -> tuple[Sizes, dict[str, float] | None]:
        sizes: Sizes = {TOKENS: length, WIDTH: length + columns, GROUP: rows, **option}
        return sizes, _coefficients(build(option), names, sampler, (length, columns, rows), near)

    lengths = [partial(at, length) for length in LENGTHS if vocabulary(names) ** (length * batch) <= MOST]
    series: dict[tuple[str, ...], list[Any]] = {
        (TOKENS, WIDTH): lengths + [partial(at, 2, columns=more) for more in WIDER],
        **{(option,): [partial(at, 2, **{option: value}) for value in VALUES] for option in OPTIONS},
        (GROUP,): [partial(at, 1, rows=rows) for rows in GROUPS] if batch > 1 else [],
    }
    for quantities, calls in series.items():
        with suppress(KltestError):
            points = [call() for call in calls]
            yield quantities, [(sizes, found) for sizes, found in points if found is not None]


def _coefficients(
    loss: Loss, names: tuple[str, ...], sampler: Sampler, size: tuple[int, int, int], near: float
) -> dict[str, float] | None:
    """Coefficients of a loss's gradient in small sequences; None if names depend on each other, or miss it."""
    length, columns, rows = size
    instance = Instance.draw(sequence(vocabulary(names), length), SEED)
    known = {name: gradient(name, instance).ravel() for name in names}
    if len(independent(known)) < len(names):
        return None
    with preserved(SEED):
        found = measure(loss, instance, sampler, rows, columns=columns)[0].ravel()
    matrix = np.stack(list(known.values()), axis=1)
    fit = np.linalg.lstsq(matrix, found, rcond=None)[0]
    if np.linalg.norm(matrix @ fit - found) > near * np.linalg.norm(found):
        return None
    return dict(zip(names, map(float, fit), strict=True))


def vocabulary(names: Iterable[str]) -> int:
    """Return how many tokens tell gradients apart: two, and two more than a support has."""
    supports = [support_named(name.partition("@")[0]) for name in names]
    return max((one.k + 2 for one in supports if one), default=2)


def _law(quantities: tuple[str, ...], points: list[tuple[Sizes, float]], near: float) -> str:
    """The law of a coefficient that fits all points; "" if none does, or if it does not change at all."""
    for quantity in quantities:
        for words, shape in SHAPES.items():
            kept = [(sizes[quantity], c, shape(sizes[quantity])) for sizes, c in points]
            if len({size for size, _, weight in kept if weight}) < LEAST:
                continue
            first = next(c / weight for _, c, weight in kept if weight)
            if first and all(abs(c - first * weight) <= near * abs(first) for _, c, weight in kept):
                return words.format(a=f"{first:.4g}", q=quantity).replace("1·(", "(")
    return ""
