"""Calls of a loss on batches of known rows: one batch a call, or many in one call if the loss keeps them apart."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.loss.calling import Loss
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.moments.reduction import NonDeterministicError
from kltest.rollout import Rollout

# Groups of a joint call that are called alone again, beside the one of the largest gradient for each total length.
SPOT_CHECKS = 2
# As many batches of the same lengths are called one by one: one call of all would be checked by as many.
FEW = 4
# Doubling a batch multiplies the gradient of a mean by √(3/2) = 1.22 at most and that of a sum by 4/3 at least: see
# `adds_up`.
MORE_THAN_A_MEAN = 1.28
Share = Literal["mean", "sum"]
Called = tuple[np.ndarray, dict[str, np.ndarray], np.ndarray | None]


class BatchCalls:
    """A loss and the rollouts from which batches are taken.

    `apart` says that groups of one call were seen not to touch each other, and how they are combined: as a mean over
    groups or as a sum. None: they touch each other, or nothing was tried. `alike` are the ways that are still possible
    of combining batches whose rows have the same lengths, as those of a mean over all tokens: none if batches are to
    be called one by one. `logs` is false if nobody asks for the logged KL.
    """

    def __init__(self, loss: Loss, base: Rollout, *, logs: bool = True) -> None:
        self.loss = loss
        self.base = base
        self.live = live_positions(base)
        self.logs = logs
        self._latest: RowGradients | None = None
        self.apart: Share | None = None
        self.alike: tuple[Share, ...] = ()
        self.reads_groups = False
        self._tried: set[object] = set()

    @property
    def dtype(self) -> str:
        """The lowest precision in which the latest call computed."""
        return self._latest.dtype if self._latest else "float64"

    def take_from(self, base: Rollout) -> None:
        """Take batches from other rollouts from now on."""
        self.base, self.live = base, live_positions(base)

    def call(self, rows: np.ndarray, *, groups: bool = False) -> RowGradients:
        """The gradients of a batch of these rows (n,), with `groups` of several batches (G, n) in one call."""
        batch = self._batch(rows, groups)
        called = differentiate(self.loss, batch, None if self.live is None else self.live[rows.reshape(-1)])
        self._latest = called
        self.reads_groups |= "group" in batch.accessed or "group" in self.loss.takes
        return called

    def _batch(self, rows: np.ndarray, groups: bool = False) -> Rollout:
        taken = self.base.take(rows.reshape(-1))
        if groups:
            number, own = torch.arange(len(rows)).repeat_interleave(rows.shape[1]), taken.peek("group")
            taken = taken.replace(group=torch.stack([number, own]).unique(dim=1, return_inverse=True)[1])
        return taken.replace(advantage=lambda: centred(taken))

    def gradients(self, rows: np.ndarray, generator: np.random.Generator) -> Iterator[Called]:
        """Gradients of batches (N, n), in parts: the batches of a part use the same leaves.

        Yields:
            The indices (M,) of a part's batches; their gradients (M, n·T) or (M, n·T, V) by leaf; and the logged KL
            (M,), None if there is none.
        """
        if self.apart and (together := self._together(rows, generator)):
            yield together
            return
        for index in self._of_the_same_lengths(rows) if self.alike else [np.arange(len(rows))]:
            if self.alike and len(index) > FEW and (alike := self._alike(rows[index], generator)):
                yield index, *alike
                continue
            called = [self.call(batch) for batch in rows[index]]
            for reached in {one.leaves for one in called}:
                mine = [i for i, one in enumerate(called) if one.leaves == reached]
                found = {leaf: _joined(np.stack([called[i].by_leaf[leaf] for i in mine])) for leaf in reached}
                yield index[mine], found, self._logged([called[i].outcome.metric for i in mine], rows.shape[1:])

    def _logged(self, metrics: Sequence[Tensor | None], shape: tuple[int, ...]) -> np.ndarray | None:
        """(N,) the logged KL of N calls of a batch each; None if there is none in one of them, or nobody asks."""
        known = [number for metric in metrics if self.logs and (number := _metric(metric, shape)) is not None]
        return np.concatenate(known) if len(known) == len(metrics) else None

    def _of_the_same_lengths(self, rows: np.ndarray) -> list[np.ndarray]:
        """Indices of batches (N, n) whose rows have the same lengths, their order aside."""
        lengths = np.sort(self._lengths[rows], axis=1)
        kinds = np.unique(lengths, axis=0, return_inverse=True)[1].reshape(-1)
        return [np.flatnonzero(kinds == kind) for kind in range(kinds.max() + 1)]

    @property
    def _lengths(self) -> np.ndarray:
        return self.base.peek("mask").sum(dim=1).numpy().astype(int)

    def _alike(
        self, rows: np.ndarray, generator: np.random.Generator
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None] | None:
        """Gradients and logged KL of batches (N, n) of the same lengths, from one call; None if they touch each other.

        Every batch is compared with itself among half of them in another order, and some with a call of their own:
        that of the largest gradient, one at random, and one for each pattern of equal rows and rewards.
        """
        try:
            whole = self.call(rows, groups=True)
            found = [part.reshape(*rows.shape, *part.shape[1:]) for part in whole.parts]
            if not any(part.any() for part in found):
                return None
            for part in self._parts(rows, found, generator):
                called = self.call(rows[part], groups=len(part) > 1)
                self.alike = tuple(share for share in self.alike if _same(called, whole.leaves, found, part, share))
                if not self.alike:
                    return None
        except KltestError:  # it is raised again where each is called alone
            self.alike = ()
            return None
        scale = len(rows) if self.alike[0] == "mean" else 1
        joined = {leaf: _joined(scale * part) for leaf, part in zip(whole.by_leaf, found, strict=True)}
        metrics: list[Tensor | None] = [None]
        if self.logs and whole.outcome.metric is not None:
            metrics = [self.loss.returned(self._batch(batch)).metric for batch in rows]
        return joined, self._logged(metrics, rows.shape[1:])

    def _parts(self, rows: np.ndarray, found: list[np.ndarray], generator: np.random.Generator) -> Iterator[np.ndarray]:
        """Indices of batches to call again: see `_alike`."""
        sizes = np.sum([(part**2).reshape(len(rows), -1).sum(axis=1) for part in found], axis=0)
        yield np.array([sizes.argmax()])
        for half in np.array_split(generator.permutation(len(rows)), 2):
            yield np.sort(half)[::-1]
        yield generator.integers(len(rows), size=1)
        rewards = self.base.peek("reward").numpy()[rows]
        for spot in generator.permutation(len(rows)):
            pattern = tuple(tuple(sorted(Counter(each.tolist()).values())) for each in (rows[spot], rewards[spot]))
            if pattern not in self._tried:
                self._tried.add(pattern)
                yield np.array([spot])

    def _together(self, rows: np.ndarray, generator: np.random.Generator) -> Called | None:
        """All groups (N, n) in one call; None if one of them gives something else when it is called alone."""
        called = self.call(rows, groups=True)
        metric = called.outcome.metric
        # One logged number would be that of all groups.
        if metric is not None and metric.dim() == 0:
            self.apart = None
            return None
        scale = len(rows) if self.apart == "mean" else 1
        parts = [scale * part.reshape(*rows.shape, *part.shape[1:]) for part in called.parts]
        for spot in {*self._telling(rows, parts), *generator.integers(len(rows), size=SPOT_CHECKS).tolist()}:
            alone = self.call(rows[spot])
            if alone.leaves != called.leaves or not alone.close(alone.parts, tuple(p[spot] for p in parts)):
                self.apart = None
                return None
        found = {leaf: _joined(part) for leaf, part in zip(called.by_leaf, parts, strict=True)}
        return np.arange(len(rows)), found, _metric(metric, rows.shape)

    def _telling(self, rows: np.ndarray, parts: list[np.ndarray]) -> Iterator[int]:
        """The group of the largest gradient for each total number of tokens: a gradient of zero would tell nothing."""
        tokens = self._lengths[rows].sum(axis=1)
        sizes = sum((part**2).reshape(len(rows), -1).sum(axis=1) for part in parts)
        for total in np.unique(tokens):
            alike = np.flatnonzero(tokens == total)
            yield int(alike[np.argmax(np.broadcast_to(sizes, len(rows))[alike])])

    def learn_to_tell_apart(self, pool: np.ndarray, size: int, generator: np.random.Generator) -> None:
        """Set `apart` if several groups in one call each give what they give alone, as a mean over groups or a sum."""
        if not self.reads_groups:
            return
        possible: set[Share] = {"mean", "sum"}
        for groups in (2, 3):
            rows = generator.choice(pool, size=(groups, size))
            try:
                called = self.call(rows, groups=True)
            except KltestError:  # the loss takes one group a call
                return
            if called.outcome.metric is not None and called.outcome.metric.dim() == 0:
                return
            for spot, batch in enumerate(rows):
                alone = self.call(batch)
                part = tuple(p[spot * size : (spot + 1) * size] for p in called.parts)
                for share in list(possible):
                    if not alone.close(alone.parts, part, groups if share == "mean" else 1):
                        possible.discard(share)
        # If all gradients were zero, a mean cannot be told from a sum.
        self.apart = possible.pop() if len(possible) == 1 else None

    def order_is_free(self, pool: np.ndarray, size: int, generator: np.random.Generator, tries: int = 4) -> bool:
        """True if reordering a batch does no more than reorder the gradients of its rows, in a few batches."""
        for attempt in range(tries if size > 1 else 0):
            rows, order = generator.choice(pool, size=size), generator.permutation(size)
            before, after = self.call(rows), self.call(rows[order])
            if attempt == 0 and not before.close(before.parts, self.call(rows).parts):
                raise NonDeterministicError.of(self.loss, partial(self.call, rows))
            if not before.close(tuple(part[order] for part in before.parts), after.parts):
                return False
        return True

    def adds_up(self, pool: np.ndarray, size: int, generator: np.random.Generator, tries: int = 3) -> bool:
        """True if a batch with every row twice moves each rollout about twice as much, as a sum over rows does.

        A mean moves it as much, or a little less or more: by 2(n−1)/(2n−1) with a baseline that leaves the row itself
        out, by up to √(3/2) with a standard deviation over n − 1. The lowest of a sum is twice 2/3, at n = 2.
        """
        for _ in range(tries if size > 1 else 0):
            rows = generator.choice(pool, size=size, replace=len(pool) < size)
            try:
                once, twice = self.call(rows), self.call(np.concatenate([rows, rows]))
            except KltestError:  # the loss takes batches of one size only
                return False
            if once.leaves == twice.leaves and any(part.any() for part in once.parts):
                pairs = [(one, two[:size] + two[size:]) for one, two in zip(once.parts, twice.parts, strict=True)]
                return sum(float((a * b).sum()) for a, b in pairs) > MORE_THAN_A_MEAN * sum(
                    float((a * a).sum()) for a, _ in pairs
                )
        return False


def _same(
    called: RowGradients, leaves: frozenset[str], whole: list[np.ndarray], part: np.ndarray, share: Share
) -> bool:
    """True if batches `part` give in a call what they give among the `whole` (N, n, …), as a mean or as a sum."""
    scales = (len(whole[0]), len(part)) if share == "mean" else (1, 1)
    own = tuple(scales[0] * each[part].reshape(-1, *each.shape[2:]) for each in whole)
    return called.leaves == leaves and called.close_rows(own, scales[1])


def _joined(gradients: np.ndarray) -> np.ndarray:
    """(M, n, T, …) as (M, n·T, …)."""
    return gradients.reshape(len(gradients), -1, *gradients.shape[3:])


def _metric(metric: Tensor | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """(N,) the logged KL of each batch of a call: if it is logged by row, the mean over the batch's rows."""
    if metric is None:
        return None
    reported = metric.numpy()
    if reported.ndim == 0:
        return reported.reshape(1)
    return reported.reshape(-1, shape[-1]).mean(axis=1) if reported.ndim == 1 else None


def centred(rollout: Rollout) -> Tensor:
    """(B,) the reward minus its mean over the rows of the same group."""
    reward, group = rollout.peek("reward"), rollout.peek("group")
    same = (group[:, None] == group[None, :]).to(reward.dtype)
    return reward - same @ reward / same.sum(dim=1)
