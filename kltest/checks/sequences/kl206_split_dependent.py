"""KL206: the gradient depends on how a batch is cut into parts.

The gradient of a whole batch is compared with the accumulated gradients of its parts, in an environment of varying
length whatever environments are graded: at a fixed length a mean over tokens is a mean over rollouts. Groups are never
cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kltest.checks.check import Found
from kltest.checks.group_fixture import GroupFixture, gradient, group_fixture, limit, norm
from kltest.checks.losses import squared_sum
from kltest.checks.sequences.kl204_batch_normalised import mean_over_tokens
from kltest.counterexample.demonstration import Demonstration
from kltest.counterexample.environment import SmallEnvironment
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.calling import Loss, bind
from kltest.loss.view import ROW_FIELDS
from kltest.moments import exact_batches
from kltest.moments.differentiate import differentiate, live_positions
from kltest.rollout import Rollout

# The environment of the experiment; rollouts a batch, in groups and without.
VARYING = "ragged"
GROUPS, ROWS = 4, 8
ALIKE = 4
# Sizes of the batches that are enumerated: the smallest that differ and have more than one row.
SIZES = (2, 3)

Cut = list[np.ndarray]


def examine(findings: Findings) -> Found | None:
    found = _split(findings)
    if found.unfit:
        return Found(f"the loss takes one group per call: {found.unfit}, and it does not read groups", "skip")
    if found.moved <= limit(findings):
        return None
    parts = " + ".join(map(str, found.parts))
    return Found(
        f"{found.whole} rollouts of different lengths in one batch, and cut into {parts} with the gradients of the "
        f"parts accumulated: the two gradients differ by {found.moved:.3g} of their size, though no group was cut."
    )


@dataclass(frozen=True)
class Split:
    """Effect of the cut that moves the gradient most.

    `moved`: distance of the accumulated parts from the whole, relative to it. `whole` and `parts` count rollouts.
    `unfit`: why a batch of this loss cannot be cut.
    """

    moved: float
    whole: int = 0
    parts: tuple[int, ...] = ()
    unfit: str = ""


def _split(findings: Findings) -> Split:
    reads_groups = "group" in findings.observed.uses
    size = group_fixture(findings).size
    fixture = GroupFixture(findings.measure, instances(VARYING, findings.seed, size)[0], size, findings.seed)
    lengths = fixture.instance.paths.lengths
    if reads_groups:
        found = _moved(findings, _batch(fixture, _of_all_lengths(lengths, GROUPS * size), size), size)
        return found if found.moved > limit(findings) and _in_expectation(findings) else Split(0.0)
    try:
        found = _moved(findings, _batch(fixture, _of_all_lengths(lengths, ROWS), ROWS), 1)
        if found.moved <= limit(findings) or not _in_expectation(findings):
            return Split(0.0)
        longest = np.resize(np.flatnonzero(lengths == lengths.max()), ALIKE)
        rewarded = findings.observed.uses & ROW_FIELDS
        if rewarded and _moved(findings, _batch(fixture, longest, ALIKE), 1).moved > limit(findings):
            return Split(0.0, unfit="it couples rollouts of equal length, through their rewards")
    except KltestError as error:
        return Split(0.0, unfit=f"it does not take every number of rollouts ({error})")
    return found


def _in_expectation(findings: Findings) -> bool:
    """Return True if the batch size changes the expected gradient; a baseline of other rollouts changes noise only."""
    instance = instances(VARYING, findings.seed, ALIKE)[0]
    small, large = (exact_batches(findings.loss, instance, size=size, padding=findings.seed).gradient for size in SIZES)
    kept, as_sum = norm(small - large), norm(small / SIZES[0] - large / SIZES[1]) * SIZES[1]
    return min(kept, as_sum) > limit(findings) * norm(large)


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
    """The cut that moves the gradient most, parts accumulated as a mean over rollouts or, if closer, as a sum."""
    whole = gradient(findings.measure, rollout)
    size, rows = norm(whole), len(rollout)
    if size == 0:
        return Split(0.0)
    worst = {False: Split(0.0), True: Split(0.0)}
    for cut in _cuts(rows // unit):
        parts = [(np.arange(rows).reshape(-1, unit)[part].reshape(-1)) for part in cut]
        found = [gradient(findings.measure, rollout.take(part)) for part in parts]
        for as_sum in worst:
            together = np.zeros_like(whole)
            for part, own in zip(parts, found, strict=True):
                together[part] = own if as_sum else own * len(part) / rows
            candidate = Split(norm(together - whole) / size, rows, tuple(map(len, parts)))
            worst[as_sum] = max(worst[as_sum], candidate, key=lambda split: split.moved)
    return min(worst.values(), key=lambda split: split.moved)


def _cuts(units: int) -> list[Cut]:
    """Two halves, another two halves, and quarters."""
    order = np.arange(units)
    return [np.split(order, 2), [order[::2], order[1::2]], *([np.split(order, 4)] if units >= 4 else [])]


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2), (0.5, 0.5)], reference=[(0.5, 0.5)] * 2, length=2, ends=True)


def demonstrate() -> Demonstration:
    instance = ENVIRONMENT.instance()
    losses = [bind(loss) for loss in (mean_over_tokens, squared_sum)]
    everything = Rollout.of(instance)
    lengths = instance.paths.lengths
    short, long = int(lengths.argmin()), int(lengths.argmax())

    def weight(loss: Loss, *rows: int) -> float:
        """∂/∂log π of the first token of the first rollout."""
        batch = everything.take(np.array(rows))
        found = differentiate(loss, batch, live_positions(batch)).logp
        assert found is not None
        return float(found[0, 0])

    rows: tuple[tuple[str | float, ...], ...] = (
        ("both in one batch", *(weight(loss, short, long) for loss in losses)),
        ("one after the other, accumulated", *(weight(loss, short) / 2 for loss in losses)),
    )
    return Demonstration(
        f"{ENVIRONMENT.words()}\nThe weight of the rollout that ends at once, beside one of two tokens.",
        ("batch", "as written", "fixed"),
        rows,
    )
