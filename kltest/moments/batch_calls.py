"""Calls of a loss on batches of known rows: one batch a call, or many groups a call if the loss keeps them apart."""

from collections.abc import Iterator
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
# Doubling a batch multiplies the gradient of a mean by √(3/2) = 1.22 at most and that of a sum by 4/3 at least: see
# `adds_up`.
MORE_THAN_A_MEAN = 1.28
Share = Literal["mean", "sum"]
Called = tuple[np.ndarray, dict[str, np.ndarray], np.ndarray | None]


class BatchCalls:
    """A loss and the rollouts from which batches are taken.

    `apart` says that groups of one call were seen not to touch each other, and how they are combined: as a mean over
    groups or as a sum. None: they touch each other, or nothing was tried.
    """

    def __init__(self, loss: Loss, base: Rollout) -> None:
        self.loss = loss
        self.base = base
        self.live = live_positions(base)
        self._latest: RowGradients | None = None
        self.apart: Share | None = None
        self.reads_groups = False

    @property
    def dtype(self) -> str:
        """The lowest precision in which the latest call computed."""
        return self._latest.dtype if self._latest else "float64"

    def take_from(self, base: Rollout) -> None:
        """Take batches from other rollouts from now on."""
        self.base, self.live = base, live_positions(base)

    def call(self, rows: np.ndarray, *, groups: bool = False) -> RowGradients:
        """The gradients of a batch of these rows (n,), with `groups` of several groups (G, n) in one call."""
        flat = rows.reshape(-1)
        taken = self.base.take(flat)
        if groups:
            taken = taken.replace(group=lambda: torch.arange(len(rows)).repeat_interleave(rows.shape[1]))
        batch = taken.replace(advantage=lambda: centred(taken))
        called = differentiate(self.loss, batch, None if self.live is None else self.live[flat])
        self._latest = called
        self.reads_groups |= "group" in batch.accessed or "group" in self.loss.takes
        return called

    def gradients(self, rows: np.ndarray, generator: np.random.Generator) -> Iterator[Called]:
        """Gradients of batches (N, n), in parts: the batches of a part use the same leaves.

        Yields:
            The indices (M,) of a part's batches; their gradients (M, n·T) or (M, n·T, V) by leaf; and the logged KL
            (M,), None if there is none.
        """
        if self.apart and (together := self._together(rows, generator)):
            yield together
            return
        called = [self.call(batch) for batch in rows]
        for reached in {one.leaves for one in called}:
            index = [i for i, one in enumerate(called) if one.leaves == reached]
            metrics = [_metric(called[i].outcome.metric, rows.shape[1:]) for i in index]
            known = [metric[0] for metric in metrics if metric is not None]
            yield (
                np.array(index),
                {leaf: _joined(np.stack([called[i].by_leaf[leaf] for i in index])) for leaf in reached},
                np.array(known) if len(known) == len(index) else None,
            )

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
        lengths = self.base.peek("mask").sum(dim=1).numpy().astype(int)
        tokens = lengths[rows].sum(axis=1)
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
