"""Calls of a loss on units of rows, one rollout or a batch of several each: alone, or many units in one call.

Units are rows of one call if the loss keeps them apart. If it does not, torch.vmap gives it each unit alone, if it can.

Let g_i be the gradient at the rows of unit i when it is called alone, and g_i(S) within a call of units S. A mean over
units has g_i(S) = g_i/|S| and a sum g_i(S) = g_i, for every call and unit; anything else couples units, however small
the effect. Calls of few prove what a call of many gives.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kltest.errors import KltestError, TargetError
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.moments.mapped import mapped
from kltest.moments.moments import Reduction, Together
from kltest.moments.tolerances import LOWEST_FIRST, near_rows
from kltest.rollout import Rollout

Share = Literal["mean", "sum"]
BOTH: tuple[Share, ...] = ("mean", "sum")
# As many batches of the same lengths are called one by one: one call of all would be checked by as many.
FEW = 4
# Rows of the batches on which is tried if a loss that fails on one row runs on more.
SIZES = (2, 4, 8, 3, 6, 12, 16, 32)
# Batches on which is tried if those of any lengths are kept apart.
TRIED = 6


class BatchOfOneError(TargetError):
    """The loss fails on one rollout and runs on more: grade it by batches or groups."""


@dataclass(frozen=True)
class Called:
    """Some of the units that were requested, which use the same leaves.

    Attributes:
        index: (M,) which of the units.
        by_leaf: (M, n·T) or (M, n·T, V) gradients of each unit, as it gives them alone.
        value: (M,) what the loss returned for each rollout, summed over tokens; None if it returned no such number.
        metric: (M,) the logged KL of each, None if there is none.
    """

    index: np.ndarray
    by_leaf: dict[str, np.ndarray]
    value: np.ndarray | None
    metric: np.ndarray | None

    def some(self, chosen: np.ndarray) -> "Called":
        """Return some of them, chosen (M,) bool."""
        reports = (None if one is None else one[chosen] for one in (self.value, self.metric))
        return Called(self.index[chosen], {leaf: part[chosen] for leaf, part in self.by_leaf.items()}, *reports)


class Caller:
    """A loss, the rollouts from which units are taken, and what was seen of how it combines units.

    Attributes:
        shares: How units of one call may be combined: of those seen so far, all agree with each of these.
        coupling: The first observation that showed units to be coupled, else empty.
        together: Which batches are called together: of "any" lengths, of the "same" lengths, or "none".
        dtype: The lowest precision in which the latest call computed.
        reads_groups: True if the loss reads which group a row belongs to.
        mapped: False if torch.vmap was seen to refuse the loss, or to give something else than a call of each unit.
        wide: True if a gradient reached the next-token log-probs of a row that was called alone.
    """

    def __init__(self, loss: Loss, base: Rollout, *, batches: bool = False, logs: bool = True) -> None:
        """Units are single rollouts, or `batches`, in which advantages are centred; `logs`: their reports are read."""
        self.loss, self.batches, self.logs = loss, batches, logs
        self.shares, self.coupling = BOTH, ""
        self.together: Together = "none"
        self.dtype, self.wide, self.reads_groups, self._by_row = "float64", False, False, False
        self.mapped, self._read = True, set[str]()
        self.singles: dict[int, RowGradients] = {}
        self._patterns: set[object] = set()
        self.take_from(base)

    def take_from(self, base: Rollout) -> None:
        """Take units from these rollouts from now on."""
        self.base, self._live, self.singles = base, live_positions(base), {}

    def call(self, units: Sequence[int] | np.ndarray) -> RowGradients:
        """Return the gradients of one call, of one unit (n,) or of several (N, n)."""
        units = np.asarray(units)
        rows = units.reshape(-1)
        taken = self._taken(units)
        called = differentiate(self.loss, taken, None if self._live is None else self._live[rows])
        self.dtype = called.dtype
        self._by_row |= called.outcome.rows is not None
        self._read |= taken.accessed
        self.reads_groups |= "group" in taken.accessed or "group" in self.loss.takes
        return called

    def _taken(self, units: np.ndarray) -> Rollout:
        taken = self.base.take(units.reshape(-1))
        if not self.batches:
            return taken
        if units.ndim > 1:
            number, own = torch.arange(len(units)).repeat_interleave(units.shape[1]), taken.peek("group")
            each = number * (int(own.max()) + 1) + own
            taken = taken.replace(group=each.unique(return_inverse=True)[1])
        return taken.replace(advantage=lambda: centred(taken))

    # Single rollouts

    @property
    def reduction(self) -> Reduction:
        """The reduction over rows that all calls so far agree with."""
        if not self.shares:
            return "coupled"
        if "mean" not in self.shares:
            return "sum"
        return "per-row" if self._by_row else "mean"

    def single(self, row: int) -> RowGradients:
        """Return the gradients of a row alone, called once; BatchOfOneError if it fails and does not among others."""
        if row not in self.singles:
            try:
                self.singles[row] = self.call([row])
            except KltestError as error:
                self._explain_failure(row, error)
                raise
            self.wide |= "logits" in self.singles[row].leaves
        return self.singles[row]

    def look(self, rows: Sequence[int]) -> None:
        """Call the loss on a batch of these rows and compare with what each row gives alone."""
        called, own = self.call(rows), [self.single(row) for row in rows]
        self.shares = tuple(share for share in self.shares if _same(own, called, len(rows) if share == "mean" else 1))
        if not self.shares:
            twice = len(set(rows)) < len(rows) == 2
            self.found_coupled("the same rollout twice" if twice else f"a batch of {len(rows)} rollouts")

    def found_coupled(self, words: str) -> None:
        """Record a coupling; only the first observation is kept."""
        self.shares = ()
        self.coupling = self.coupling or f"in {words} the gradient of a row is not a fixed share of what it gives alone"

    def _explain_failure(self, row: int, error: KltestError) -> None:
        for size in SIZES:
            try:
                self.call([each % len(self.base) for each in range(row, row + size)])
            except KltestError:
                continue
            raise BatchOfOneError(
                f"{self.loss.name} fails on a batch of one rollout and runs on {size}: it needs whole groups, so "
                f"that its gradient must be graded by batches of {size} or more ({error})"
            ) from error

    # Many units

    def alone(self, units: np.ndarray) -> Iterator[Called]:
        """Yield the gradients of units (N, n), each from a call of its own."""
        called = [self._alone(unit) for unit in units]
        for leaves in dict.fromkeys(one.leaves for one in called):
            index = [place for place, one in enumerate(called) if one.leaves == leaves]
            mine = [called[place] for place in index]
            by_leaf = {leaf: np.stack([one.by_leaf[leaf] for one in mine]) for leaf in mine[0].by_leaf}
            outcomes = [(unit, one.outcome) for unit, one in zip(units[index], mine, strict=True)]
            value = None if self.batches else joined([self._each(outcome.value, unit) for unit, outcome in outcomes])
            metric = joined([self._each(outcome.metric, unit) for unit, outcome in outcomes])
            yield Called(np.array(index), _flat(by_leaf, len(index)), value, metric)

    def one_by_one(self, units: np.ndarray, generator: np.random.Generator) -> Iterator[Called]:
        """Yield the gradients of rows (N, 1) as each gives them alone; in one call if groups of one are kept apart."""
        if self.coupling and len(units) > FEW and self.single(int(units[0, 0])) and self.reads_groups:
            own = Caller(self.loss, self.base.replace(group=torch.arange(len(self.base))), logs=self.logs)
            with suppress(KltestError):  # it is raised again where each is called alone
                if found := own.joint(units, generator):
                    self.dtype = own.dtype
                    yield found
                    return
        yield from self.apart(units) if self.coupling else self.alone(units)

    def apart(self, units: np.ndarray) -> Iterator[Called]:
        """Yield the gradients of units (N, n) as each gives them alone: called by torch.vmap, or else one by one."""
        if self.mapped and len(units) > FEW:
            with suppress(KltestError):  # it is raised again where each is called alone
                if found := self._mapped(units):
                    yield found
                    return
            self.mapped = False
        yield from self.alone(units)

    def _mapped(self, units: np.ndarray) -> Called | None:
        """Return the gradients of units (N, n) by torch.vmap; None if calls of single units give something else.

        Three of them: those of the largest and of the smallest gradient, and one at random. torch.vmap refuses whatever
        would do with some units what it does not do with others. Not believed either, if every gradient is zero.
        """
        if not self._read:
            self._alone(units[0])  # it shows which fields the loss reads
        rows, taken = units.reshape(-1), self._taken(units)
        if self.batches:
            taken = taken.replace(group=self.base.peek("group")[rows])
        loss = mapped(self.loss, units.shape[1], self._read)
        whole = differentiate(loss, taken, None if self._live is None else self._live[rows])
        found = Called(np.arange(len(units)), _flat(whole.by_leaf, len(units)), *self._reports(whole.outcome, units))
        if not any(part.any() for part in whole.parts):
            return None
        sizes = _sizes(whole, len(units))
        for place in (int(sizes.argmax()), int(sizes.argmin()), int(np.random.default_rng(0).integers(len(units)))):
            called = self._alone(units[place])
            own = tuple(part.reshape(len(units), -1, *part.shape[1:])[place] for part in whole.parts)
            if called.leaves != whole.leaves or not called.close_rows(own):
                return None
            reports = zip(self._reports(called.outcome, units[[place]]), (found.value, found.metric), strict=True)
            if not all(_near_reports(one, many, place, called.dtype) for one, many in reports):
                return None
        return found

    def _alone(self, unit: np.ndarray) -> RowGradients:
        return self.call(unit) if self.batches else self.single(int(unit[0]))

    def _reports(self, outcome: Outcome, units: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Value and metric (N,) of what a call reports of N units; of batches no value."""
        return None if self.batches else self._each(outcome.value, units), self._each(outcome.metric, units)

    def joint(self, units: np.ndarray, generator: np.random.Generator, *, prove: bool = True) -> Called | None:
        """Return the gradients of units (N, n) as each gives them alone, from one call.

        Args:
            units: The units.
            generator: Source of the calls that prove it.
            prove: False to believe it without such calls.

        Returns:
            None if calls of some of the units refute it: halves in another order, and alone the units of the largest
            and of the smallest gradient, which a threshold of the call parts, one at random, and of batches the largest
            of each total length and one of each pattern of equal rows and rewards. If reports are read, those of rows
            have to be the same; one logged number a call, and what a batch logs, is taken from a call of each unit.
        """
        whole = self.call(units)
        for part in self._again(units, whole, generator) if prove else ():
            called = self.call(units[part])
            rows = (part[:, None] * units.shape[1] + np.arange(units.shape[1])).reshape(-1)
            self.shares = tuple(
                share
                for share in self.shares
                if called.leaves == whole.leaves
                and called.close_rows(
                    tuple(_scale(share, units) * each[rows] for each in whole.parts), _scale(share, part)
                )
            )
            if not self.shares or (self.logs and not self.batches and not _same_reports(called, whole, rows)):
                return None
        scale, outcome = _scale(self.shares[0], units), whole.outcome
        value = None if self.batches else self._each(outcome.value, units)
        metric = self._each(outcome.metric, units)
        if self.logs and outcome.metric is not None and (self.batches or outcome.metric.dim() == 0):
            metric = joined([self._each(self.loss.returned(self._taken(unit)).metric, unit) for unit in units])
            if metric is None and not self.batches:
                return None
        by_leaf = {leaf: scale * part for leaf, part in whole.by_leaf.items()}
        return Called(np.arange(len(units)), _flat(by_leaf, len(units)), value, metric)

    def _again(self, units: np.ndarray, whole: RowGradients, generator: np.random.Generator) -> Iterator[np.ndarray]:
        sizes = _sizes(whole, len(units))
        totals = self._lengths[units].sum(axis=1) if self.batches else np.zeros(len(units))
        for total in np.unique(totals):
            alike = np.flatnonzero(totals == total)
            yield alike[[sizes[alike].argmax()]]
        yield np.array([sizes.argmin()])
        halves = np.array_split(generator.permutation(len(units)), 2)
        # A mean over draws takes seconds in large batches; whether they couple rows is looked for by KL204.
        for half in halves if whole.dtype != LOWEST_FIRST[0] else ():
            yield np.sort(half)[::-1]
        yield generator.integers(len(units), size=1)
        if self.batches:
            rewards = self.base.peek("reward").numpy()[units]
            order = generator.permutation(len(units))
            patterns = np.concatenate([_repeats(units[order]), _repeats(rewards[order])], axis=1)
            for pattern, spot in zip(*np.unique(patterns, axis=0, return_index=True), strict=True):
                if pattern.tobytes() not in self._patterns:
                    self._patterns.add(pattern.tobytes())
                    yield order[[spot]]

    @property
    def _lengths(self) -> np.ndarray:
        return self.base.peek("mask").sum(dim=1).numpy().astype(int)

    # Batches

    def try_together(self, pool: np.ndarray, size: int, generator: np.random.Generator) -> None:
        """Find out which batches of rows of a pool may be called together: of any lengths if it tells groups apart."""
        self.together = "any" if self.reads_groups else "same"
        list(self.gradients(generator.choice(pool, size=(TRIED, size)), generator))

    def gradients(self, units: np.ndarray, generator: np.random.Generator, *, prove: bool = True) -> Iterator[Called]:
        """Yield the gradients of batches (N, n) as each gives them alone, together as far as `together` says."""
        if self.together == "any":
            if found := self._joined(units, generator, prove):
                yield found
                return
            self.together, self.shares = "same", BOTH
        lengths = np.sort(self._lengths[units], axis=1)
        kinds = np.unique(lengths, axis=0, return_inverse=True)[1].reshape(-1)
        for kind in range(kinds.max() + 1) if self.together == "same" else [None]:
            index = np.arange(len(units)) if kind is None else np.flatnonzero(kinds == kind)
            joint = (
                self._joined(units[index], generator, prove) if self.together == "same" and len(index) > FEW else None
            )
            for part in [joint] if joint else self.apart(units[index]):
                yield replace(part, index=index[part.index])

    def _joined(self, units: np.ndarray, generator: np.random.Generator, prove: bool) -> Called | None:
        """Return units from one call; None if they touch each other, or if the loss refuses so many."""
        try:
            # Until a gradient is not zero, a sum cannot be told from a mean.
            found = self.joint(units, generator, prove=prove or len(self.shares) > 1)
        except KltestError:  # it is raised again where each is called alone
            found = None
        if found is None:
            self.together = "none"
        # A threshold of the call may silence all of them, and few alone.
        return found if found and any(part.any() for part in found.by_leaf.values()) else None

    def _each(self, reported: Tensor | None, units: np.ndarray) -> np.ndarray | None:
        """(N,) of what a call reports for N units, summed over tokens, averaged over rows; None if unknown."""
        if reported is None or (self.batches and not self.logs):
            return None
        found, rows = reported.numpy(), units.reshape(-1)
        if found.ndim == 2 and not self.batches:
            found = (found if self._live is None else np.where(self._live[rows], found, 0.0)) @ np.ones(found.shape[1])
        if found.ndim == 1 and len(found) == len(rows):
            return found.reshape(-1, units.shape[-1]).mean(axis=1)
        return found.reshape(1) if found.ndim == 0 and len(rows) == units.shape[-1] else None


def _same(own: Sequence[RowGradients], called: RowGradients, factor: float) -> bool:
    """True if `factor` times the gradient of each row of a batch is what the row gives alone."""
    if all(single.leaves == called.leaves for single in own):
        leaves = zip(*(single.parts for single in own), strict=True)
        return called.close_rows(tuple(np.concatenate(parts) for parts in leaves), factor)
    return all(called.close(single.row(0), called.row(position), factor) for position, single in enumerate(own))


def _scale(share: Share, units: np.ndarray) -> int:
    return len(units) if share == "mean" else 1


def _same_reports(part: RowGradients, whole: RowGradients, rows: np.ndarray) -> bool:
    """True if a part of a call reports, row by row, what the whole reports for these rows, or if neither does."""
    pairs = ((part.outcome.value, whole.outcome.value), (part.outcome.metric, whole.outcome.metric))
    for own, other in pairs:
        if own is None or other is None or own.dim() == 0 or other.dim() == 0:
            if (own is None or own.dim() == 0) != (other is None or other.dim() == 0):
                return False
        elif own.dim() != other.dim() or not near_rows(own.numpy(), other.numpy()[rows], part.dtype):
            return False
    return True


def _sizes(called: RowGradients, count: int) -> np.ndarray:
    """(count,) squared sizes of the gradients of units of equal numbers of rows."""
    return np.zeros(count) + sum((part**2).reshape(count, -1).sum(axis=1) for part in called.parts)


def _near_reports(one: np.ndarray | None, whole: np.ndarray | None, place: int, dtype: str) -> bool:
    """True if a call of one unit reports what a call of many reports for it, or if neither reports anything."""
    if one is None or whole is None:
        return one is whole
    return bool(np.isnan([*one, whole[place]]).all()) or near_rows(one, whole[[place]], dtype)


def _flat(by_leaf: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Gradients of the rows of `count` batches as (count, n·T) at logp and (count, n·T, V) at logits."""
    return {
        leaf: part.reshape(count, -1, *((part.shape[-1],) if leaf == "logits" else ()))
        for leaf, part in by_leaf.items()
    }


def joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate the numbers of several calls; None if one of them reports none."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None


def _repeats(units: np.ndarray) -> np.ndarray:
    """(N, n) how often each entry of a row of (N, n) occurs in it, the fewest first."""
    return np.sort((units[:, :, None] == units[:, None, :]).sum(axis=2), axis=1)


def centred(rollout: Rollout) -> Tensor:
    """(B,) the reward minus its mean over the rows of the same group."""
    reward, group = rollout.peek("reward"), rollout.peek("group")
    place = group.unique(return_inverse=True)[1]
    sums = torch.stack([reward, torch.ones_like(reward)])
    total, rows = sums.new_zeros(2, int(place.max()) + 1).index_add(1, place, sums)[:, place]
    return reward - total / rows
