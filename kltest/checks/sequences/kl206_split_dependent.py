"""KL206: the gradient depends on how a batch is cut into parts.

The gradient of a whole batch is compared with the accumulated gradients of its parts, in an environment of varying
length whatever environments are graded: at a fixed length a mean over tokens is a mean over rollouts. Groups are never
cut.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from kltest.checks.batches import GroupFixture, apart, gradient, gradient_given, group_fixture, limit, norm, noticeable
from kltest.checks.check import Found
from kltest.checks.sequences.larger_batches import noisier
from kltest.errors import KltestError, TargetError
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.view import ROW_FIELDS
from kltest.moments import exact_batches
from kltest.rollout import Rollout

# The environment of the experiment; rollouts a batch, in groups and without.
VARYING = "ragged"
GROUPS, ROWS = 4, 8
ALIKE = 4
# Batches over which noise is averaged.
DRAWN = 32
# What trainers pass of the whole optimizer's step with each batch.
COUNT = "num_items_in_batch"
# Sizes of the batches that are enumerated: the smallest that differ and have more than one row.
SIZES = (2, 3)


def examine(findings: Findings) -> Found | None:
    """Report a gradient of a batch that is not the sum of those of its parts."""
    size, grouped = group_fixture(findings).size, "group" in findings.observed.uses
    fixture = GroupFixture(findings.measure, instances(VARYING, findings.seed, size)[0], size, findings.seed)
    lengths = fixture.instance.paths.lengths
    # Parts are whole groups, or as large as the batches that were asked for.
    sizes = findings.measure.sizes
    asked = size if sizes.requested and not sizes.grouped else 1
    cuts = ROWS if asked == 1 else GROUPS if asked <= GROUPS else 2
    count, group, unit = (GROUPS * size, size, size) if grouped else (cuts * asked, ROWS, asked)
    try:
        found = _moved(findings, _batch(fixture, _of_all_lengths(lengths, count), group), unit)
        if found.moved <= noticeable(findings):
            return noisier(findings)
        if _is_counted(findings):
            return Found(_words(found, f", each given the {COUNT} of the whole,"))
        expected = asked == 1 and _in_expectation(findings)
        longest = np.resize(np.flatnonzero(lengths == lengths.max()), ALIKE)
        rewarded = not grouped and findings.observed.uses & ROW_FIELDS
        coupled = rewarded and _moved(findings, _batch(fixture, longest, ALIKE), 1).moved > limit(findings)
        # A group is one call, and its baseline is made of all of it; a baseline takes noise away.
        if coupled and (expected or _calmer(findings, fixture)):
            raise TargetError("it couples rollouts of equal length, through their rewards")
    except KltestError as error:
        if grouped:
            raise
        return Found(f"the loss takes one group per call: {error}, and it does not read groups", "skip")
    words = _words(found)
    if expected:
        return Found(words)
    expectation = f"The expected gradient is the same in batches of {SIZES[0]} and of {SIZES[1]}"
    if asked > 1:
        expectation = f"Only the expected gradient of batches of {asked} was asked for"
    return Found(
        f"{words} The accumulated one is {found.factor:.3g} times as long. {expectation}.",
        level="warning",
    )


def _is_counted(findings: Findings) -> bool:
    return COUNT in findings.loss.filled


def _words(found: "Split", given: str = "") -> str:
    parts = " + ".join(map(str, found.parts))
    return (
        f"{sum(found.parts)} rollouts of different lengths in one batch, and cut into {parts}{given} with their "
        f"gradients accumulated: the two gradients differ by {found.moved:.3g} of their size, though no group was cut."
    )


class Split(NamedTuple):
    """Distance of the accumulated parts of a batch from the whole, relative to it, and the rollouts of each part.

    `factor` is the norm of the accumulated gradient over that of the whole.
    """

    moved: float
    factor: float = 1.0
    parts: tuple[int, ...] = ()


def _in_expectation(findings: Findings) -> bool:
    """Return True if the batch size changes the expected gradient; a baseline of other rollouts changes noise only."""
    instance = instances(VARYING, findings.seed, ALIKE)[0]
    small, large = (
        exact_batches(findings.loss, instance, size=size, padding=findings.seed, logs=False).gradient for size in SIZES
    )
    off = min(apart(share * small, large) for share in (1.0, SIZES[1] / SIZES[0]))
    return off > noticeable(findings)


def _calmer(findings: Findings, fixture: GroupFixture) -> bool:
    """Return True if the gradients of whole batches have a smaller mean square than those of their accumulated rows."""
    generator = np.random.default_rng(findings.seed)
    chances = fixture.instance.rollout_weights(fixture.sampler)
    whole = parts = 0.0
    for _ in range(DRAWN):
        batch = _batch(fixture, generator.choice(len(chances), size=ALIKE, p=chances / chances.sum()), ALIKE)
        halves = [gradient(findings.measure, batch.take(rows)) / 2 for rows in np.split(np.arange(ALIKE), 2)]
        whole += norm(gradient(findings.measure, batch)) ** 2
        parts += norm(np.concatenate(halves)) ** 2
    return whole < parts


def _of_all_lengths(lengths: np.ndarray, count: int) -> np.ndarray:
    """Rollouts, the shortest in the first quarter and then both kinds, so that parts differ in mean and largest length.

    Neighbours differ if there are other rollouts of their length.
    """
    order = np.argsort(lengths, kind="stable")
    long, short = order[::-1], order[lengths[order] == lengths.min()]
    mixed = [short[place % len(short)] if place % 3 == 0 else long[place % len(long)] for place in range(count)]
    return np.concatenate([np.resize(short, count // 4), mixed[count // 4 :]])


def _batch(fixture: GroupFixture, rows: np.ndarray, group: int) -> Rollout:
    """Groups of `group` rollouts; each group has one rewarded rollout more than the one before."""
    number, within = np.divmod(np.arange(len(rows)), group)
    return fixture.rollout(rows, (within <= number % group).astype(float).tolist(), number.tolist())


def _moved(findings: Findings, rollout: Rollout, unit: int) -> Split:
    """The cut that moves the gradient most, parts accumulated as a mean over rollouts or, if closer, as a sum.

    A loss that takes the live tokens of all batches of an optimizer's step gets those of the whole with each part.
    """
    tokens = (rollout.peek("mask") != 0).sum()
    part_of = partial(gradient, findings.measure)
    if _is_counted(findings):
        part_of = partial(gradient_given, findings.measure, COUNT, tokens)
    whole, units = part_of(rollout), np.arange(len(rollout)).reshape(-1, unit)
    halves, added = np.arange(len(units)).reshape(2, -1), np.zeros_like(whole)
    if not whole.any():
        return Split(0.0)
    splits = []
    for cut in (halves, halves.reshape(-1, 2).T, *([halves.reshape(4, -1)] if len(units) >= 4 else [])):
        for part in cut:
            added[units[part].ravel()] = part_of(rollout.take(units[part].ravel()))
        sizes = tuple(len(part) * unit for part in cut)
        splits.append([Split(apart(one, whole), norm(one) / norm(whole), sizes) for one in (added / len(cut), added)])
    return min(map(max, zip(*splits, strict=True)))
