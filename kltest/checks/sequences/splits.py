"""Experiments on how a batch is cut: the gradient of a whole batch beside those of its parts, accumulated.

Looked at where lengths vary, whatever worlds were asked for: at a fixed length a mean over tokens is a mean over
rollouts. Groups are never cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kltest.checks.group_fixture import Bench, bench, gradient, limit, norm
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.view import ROW_FIELDS
from kltest.moments import exact_batches
from kltest.rollout import Rollout

WORLD = "ragged"
GROUPS, ROWS = 4, 8
ALIKE = 4
# Of batches that are counted one by one: the smallest that differ and have rows beside each other.
SIZES = (2, 3)

Cut = list[np.ndarray]


@dataclass(frozen=True)
class Split:
    """`moved`: how far the accumulated parts are from the whole, relative to it, for the cut that moves it most.

    `whole` and `parts` count the rollouts of that cut. `unfit` says why a batch of this loss cannot be cut.
    """

    moved: float
    whole: int = 0
    parts: tuple[int, ...] = ()
    unfit: str = ""


def split(findings: Findings) -> Split:
    """What cutting a batch changes at most, its parts accumulated as a mean over rollouts or, if closer, as a sum."""
    return findings.once(_split)


def _split(findings: Findings) -> Split:
    reads_groups = "group" in findings.observed.uses
    size = bench(findings).size
    place = Bench(findings.loss, instances(WORLD, findings.seed, size)[0], size, findings.seed)
    lengths = place.instance.paths.lengths
    if reads_groups:
        found = _moved(findings, _batch(place, _of_all_lengths(lengths, GROUPS * size), size), size)
        return found if found.moved > limit(findings) and _in_expectation(findings) else Split(0.0)
    try:
        found = _moved(findings, _batch(place, _of_all_lengths(lengths, ROWS), ROWS), 1)
        if found.moved <= limit(findings) or not _in_expectation(findings):
            return Split(0.0)
        longest = np.resize(np.flatnonzero(lengths == lengths.max()), ALIKE)
        rewarded = findings.observed.uses & ROW_FIELDS
        if rewarded and _moved(findings, _batch(place, longest, ALIKE), 1).moved > limit(findings):
            return Split(0.0, unfit="it couples rollouts of equal length, through their rewards")
    except KltestError as error:
        return Split(0.0, unfit=f"it does not take every number of rollouts ({error})")
    return found


def _in_expectation(findings: Findings) -> bool:
    """Whether the size of a batch changes its expected gradient: a baseline of the others' only changes the noise."""
    instance = instances(WORLD, findings.seed, ALIKE)[0]
    small, large = (exact_batches(findings.loss, instance, size=size, padding=findings.seed).gradient for size in SIZES)
    kept, added_up = norm(small - large), norm(small / SIZES[0] - large / SIZES[1]) * SIZES[1]
    return min(kept, added_up) > limit(findings) * norm(large)


def _of_all_lengths(lengths: np.ndarray, count: int) -> np.ndarray:
    """Rollouts, in the first quarter the shortest and then both kinds, so that parts differ in mean and largest length.

    No two neighbours are equal where there are others of their length.
    """
    order = np.argsort(lengths, kind="stable")
    long, short = order[::-1], order[lengths[order] == lengths.min()]
    mixed = [short[place % len(short)] if place % 3 == 0 else long[place % len(long)] for place in range(count)]
    return np.concatenate([np.resize(short, count // 4), mixed[count // 4 :]])


def _batch(place: Bench, rows: np.ndarray, group: int) -> Rollout:
    """Groups of so many rollouts, one more of which is rewarded in each group than in the one before."""
    number, within = np.divmod(np.arange(len(rows)), group)
    return place.rollout(rows, (within <= number % group).astype(float).tolist(), number.tolist())


def _moved(findings: Findings, rollout: Rollout, unit: int) -> Split:
    """The cut that moves the gradient most, over the better of the two ways to accumulate."""
    whole = gradient(findings.loss, rollout)
    size, rows = norm(whole), len(rollout)
    if size == 0:
        return Split(0.0)
    worst = {False: Split(0.0), True: Split(0.0)}
    for cut in _cuts(rows // unit):
        parts = [(np.arange(rows).reshape(-1, unit)[part].reshape(-1)) for part in cut]
        found = [gradient(findings.loss, rollout.take(part)) for part in parts]
        for added_up in worst:
            together = np.zeros_like(whole)
            for part, own in zip(parts, found, strict=True):
                together[part] = own if added_up else own * len(part) / rows
            candidate = Split(norm(together - whole) / size, rows, tuple(map(len, parts)))
            worst[added_up] = max(worst[added_up], candidate, key=lambda split: split.moved)
    return min(worst.values(), key=lambda split: split.moved)


def _cuts(units: int) -> list[Cut]:
    """In halves, in another pair of halves, in quarters."""
    order = np.arange(units)
    return [np.split(order, 2), [order[::2], order[1::2]], *([np.split(order, 4)] if units >= 4 else [])]
