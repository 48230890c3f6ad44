"""The exact moments of a loss that couples the rows of a batch: over every batch of a stated small size.

Batches are those of training: rows drawn independently, or one group, rollouts of one prompt that is drawn first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, islice, product
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance, Paths
from kltest.errors import InvalidEnvironmentError, KltestError, UsageError
from kltest.loss.outcome import Loss
from kltest.moments.agreement import close
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.moments.moments import Expectation, Moments
from kltest.moments.projection import Projection
from kltest.moments.reduction import NonDeterministicError
from kltest.moments.shares import CHECKS, Copies, Shares, Weigh, weighing
from kltest.rollout import LEAVES, Rollout

MOST_BATCHES = 30_000
# Batches whose gradients are kept until they are added up together.
KEPT = 500
# So many times as many groups are enumerated where they share calls, of which a few in each are made alone as well.
TOGETHER = 20
SPOT_CHECKS = 2
# A costly loss is spared batches if there are so many times as many as are called to learn from.
WORTH = 2
# Between √(3/2) and 4/3: see `adds_up`.
MORE_THAN_A_MEAN = 1.28
Share = Literal["mean", "sum"]


def exact_batches(
    loss: Loss,
    instance: Instance,
    sampler: str = "current",
    size: int = 2,
    *,
    grouped: bool = False,
    padding: int = 0,
    seed: int = 0,
    most: int = MOST_BATCHES,
) -> Moments:
    """E[ĝ], E‖ĝ‖² of a batch of `size` rollouts: independent rows, or with `grouped` one prompt's group of that size.

    `advantage` is the reward minus the mean over the batch's rows of the same prompt. Every ordered tuple counts with
    its probability; a loss that is seen not to care for the order of rows is called once for each multiset, and one
    that is seen to tell groups apart by `group` is given many groups in one call. A loss that says of itself that it is
    `costly` is spared batches that follow from others (kltest.moments.shares). `added_up` says that rows are summed.

    Raises InvalidEnvironmentError, with the number of batches, when there are more than `most` (TOGETHER times as many
    if calls are of many groups), NonDeterministicError for a loss that gives one batch two gradients.
    """
    if size < 1:
        raise UsageError(f"a batch has at least one rollout, not {size}")

    def of_size(rows: int) -> Moments:
        return _exact(loss, instance, sampler, rows, grouped, padding, seed, most)

    moments = of_size(size)
    grows = moments.added_up and bool(moments.gradient.any()) and _grows(moments.gradient, size, of_size)
    return replace(moments, added_up=grows)


def _exact(
    loss: Loss, instance: Instance, sampler: str, size: int, grouped: bool, padding: int, seed: int, most: int
) -> Moments:
    """As above, but `added_up` only says what doubling a batch does."""
    paths = instance.paths
    batches = _Batches(loss, Rollout.of(instance, sampler=sampler, padding=padding))
    pools = _pools(instance, sampler, grouped)
    generator = np.random.default_rng([seed, size])
    ordered = not batches.order_is_free(pools[0][0], size, generator)
    if grouped and not ordered:
        batches.learn_to_tell_apart(pools[0][0], size, generator)
    count = sum(len(pool) ** size if ordered else math.comb(len(pool) + size - 1, size) for pool, _, _ in pools)
    if count > most * (TOGETHER if batches.apart else 1):
        kind = "groups" if grouped else "batches"
        order = " in their order, which matters to this loss," if ordered else ""
        raise InvalidEnvironmentError(
            f"environment {instance.environment.name!r} has {count:.6g} {kind} of {size} rollouts{order} and at most "
            f"{most} are enumerated. Use a smaller batch or a smaller world"
        )
    projection = Projection(instance.policy, distinct=False)
    leaves: frozenset[str] = frozenset()
    weights: list[np.ndarray] = []
    metrics: list[np.ndarray | None] = []
    for pool, chances, prompt in pools:
        if loss.costly and not ordered:
            batches.learn_from_few(pool, size, generator)
        drawn = iter(_drawn(pool, size, ordered))
        while kept := list(islice(drawn, KEPT)):
            rows = np.array([batch for batch, _ in kept])
            weight = prompt * chances[rows].prod(axis=1) * np.array([orders for _, orders in kept])
            # A batch is one long rollout whose tokens share contexts.
            shape = (len(kept), -1)
            long = Paths(
                paths.contexts[rows].reshape(shape),
                paths.tokens[rows].reshape(shape),
                paths.mask[rows].reshape(shape),
                paths.prompt[rows[:, 0]],
                np.log(weight),
            )
            for index, found, metric in batches.gradients(rows, generator):
                logp, logits = found.get("logp"), found.get("logits")
                projection.add(
                    long.take(index),
                    weight[index],
                    None if logp is None else logp.reshape(len(index), -1),
                    None if logits is None else logits.reshape(len(index), -1, logits.shape[-1]),
                )
                leaves |= found.keys()
                weights.append(weight[index])
                metrics.append(metric)
    known = [metric for metric in metrics if metric is not None]
    return Moments(
        gradient=projection.gradient,
        second_moment=projection.second_moment,
        rollouts=len(paths),
        reduction="coupled",
        dtype=batches.dtype,
        batch=size,
        leaves=leaves,
        takes=frozenset(loss.takes),
        metric=Expectation.of(np.concatenate(known), np.concatenate(weights)) if len(known) == len(metrics) else None,
        added_up=batches.adds_up(pools[0][0], size, generator),
    )


def _grows(gradient: np.ndarray, size: int, of_size: Callable[[int], Moments]) -> bool:
    """Whether the expected gradient of a batch is about proportional to its size; yes where it cannot be compared.

    A batch may look like a sum and be none in expectation: (Σ_i u_i)²/2n has cross terms, which vanish on average.
    """
    norm = float((gradient**2).sum())
    for other in (size - 1, size + 1):
        try:
            found = of_size(other).gradient
        except KltestError:  # made for batches of one size, or there are too many of the other
            continue
        # As other/size for a sum, if not more (where rows are compared with each other), as 1 for a mean.
        away, halfway = float((found * gradient).sum()), norm * (other / size) ** 0.5
        return away > halfway if other > size else away < halfway
    return True


class _Batches:
    """Calls a loss on batches of known rows, one by one, or as many groups in one call where it tells them apart."""

    def __init__(self, loss: Loss, base: Rollout) -> None:
        self.loss = loss
        self.base = base
        self.live = live_positions(base)
        self.dtype = "float64"
        self.apart: Share | None = None
        self.reads_groups = False
        self.shares: Shares | None = None
        self.weigh: Weigh | None = None

    @property
    def lengths(self) -> np.ndarray:
        """(rows,) how many tokens each row of the base has; whoever samples puts another base in its place."""
        return self.base.peek("mask").sum(dim=1).numpy().astype(int)

    def call(self, rows: np.ndarray, *, groups: bool = False) -> RowGradients:
        """The gradients of a batch of these rows (n,), or of several groups of rows (G, n)."""
        flat = rows.reshape(-1)
        taken = self.base.take(flat)
        if groups:
            taken = taken.replace(group=lambda: torch.arange(len(rows)).repeat_interleave(rows.shape[1]))
        batch = taken.replace(advantage=lambda: centred(taken))
        called = differentiate(self.loss, batch, None if self.live is None else self.live[flat])
        self.dtype = called.dtype
        self.reads_groups |= "group" in batch.accessed or "group" in self.loss.takes
        return called

    def gradients(
        self, rows: np.ndarray, generator: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], np.ndarray | None]]:
        """For batches (N, n): which of them, their gradients (·, n, T) or (·, n, T, V) by leaf, and the logged KL."""
        if self.shares:
            yield np.arange(len(rows)), self.shares.gradients(rows), self.weigh and self.weigh(rows)
            return
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
                {leaf: np.stack([getattr(called[i], leaf) for i in index]) for leaf in reached},
                np.array(known) if len(known) == len(index) else None,
            )

    def _together(
        self, rows: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray | None] | None:
        """All groups (N, n) in one call; None if some, called alone, turn out otherwise."""
        called = self.call(rows, groups=True)
        metric = called.outcome.metric
        if metric is not None and metric.dim() == 0 and self.weigh is None:
            self.apart = None
            return None
        scale = len(rows) if self.apart == "mean" else 1
        parts = [scale * part.reshape(*rows.shape, *part.shape[1:]) for part in called.parts]
        for spot in {*self._telling(rows, parts), *generator.integers(len(rows), size=SPOT_CHECKS).tolist()}:
            alone = self.call(rows[spot])
            if alone.leaves != called.leaves or not close(alone.parts, tuple(p[spot] for p in parts), alone.dtype):
                self.apart = None
                return None
        found = dict(zip((leaf for leaf in LEAVES if leaf in called.leaves), parts, strict=True))
        return np.arange(len(rows)), found, self.weigh(rows) if self.weigh else _metric(metric, rows.shape)

    def _telling(self, rows: np.ndarray, parts: list[np.ndarray]) -> Iterator[int]:
        """Of the groups (N, n) with as many tokens the one of the largest gradient: one that is zero tells nothing."""
        tokens = self.lengths[rows].sum(axis=1)
        sizes = sum((part**2).reshape(len(rows), -1).sum(axis=1) for part in parts)
        for total in np.unique(tokens):
            alike = np.flatnonzero(tokens == total)
            yield int(alike[np.argmax(np.broadcast_to(sizes, len(rows))[alike])])

    def learn_to_tell_apart(self, pool: np.ndarray, size: int, generator: np.random.Generator) -> None:
        """See whether several groups in one call give each what it gives alone, as a mean over groups or as a sum."""
        if not self.reads_groups:
            return
        possible: set[Share] = {"mean", "sum"}
        for groups in (2, 3):
            rows = generator.choice(pool, size=(groups, size))
            try:
                called = self.call(rows, groups=True)
            except KltestError:  # made for one group a call
                return
            one_number = called.outcome.metric is not None and called.outcome.metric.dim() == 0
            if one_number and not self.loss.costly:
                return  # the one logged number of a call would be that of all its groups
            for spot, batch in enumerate(rows):
                alone = self.call(batch)
                part = tuple(p[spot * size : (spot + 1) * size] for p in called.parts)
                for share in list(possible):
                    if not close(alone.parts, part, alone.dtype, groups if share == "mean" else 1):
                        possible.discard(share)
        # Where all was zero a mean cannot be told from a sum.
        self.apart = possible.pop() if len(possible) == 1 else None

    def learn_from_few(self, pool: np.ndarray, size: int, generator: np.random.Generator) -> None:
        """See whether batches of a pool, or what is logged for them, follow from what rows give beside their copies."""
        self.shares = self.weigh = None
        if math.comb(len(pool) + size - 1, size) < WORTH * (len(pool) + CHECKS):
            return
        copies = Copies.called(self.call, pool, size, self.lengths)
        if copies is None:
            return
        known: list[tuple[np.ndarray, RowGradients]] = []

        def call(rows: np.ndarray) -> RowGradients:
            known.append((rows, self.call(rows)))
            return known[-1][1]

        self.shares = Shares.learnt(call, copies, generator)
        logs = any(one.outcome.metric is not None for _, one in known)
        if self.shares is None and self.apart and logs:
            known += [(rows, self.call(rows)) for rows in copies.to_check(generator)]
        self.weigh = weighing(copies, known, self.shares) if logs else None
        if logs and self.weigh is None:
            self.shares = None

    def order_is_free(self, pool: np.ndarray, size: int, generator: np.random.Generator, tries: int = 4) -> bool:
        """Whether reordering a batch was seen to do no more than reorder the gradients of its rows."""
        for attempt in range(tries if size > 1 else 0):
            rows, order = generator.choice(pool, size=size), generator.permutation(size)
            before, after = self.call(rows), self.call(rows[order])
            if attempt == 0 and not close(before.parts, self.call(rows).parts, before.dtype):
                raise NonDeterministicError.of(self.loss, partial(self.call, rows))
            if not close(tuple(part[order] for part in before.parts), after.parts, before.dtype):
                return False
        return True

    def adds_up(self, pool: np.ndarray, size: int, generator: np.random.Generator, tries: int = 3) -> bool:
        """Whether a batch with every row twice moves each rollout about twice as much, as a sum over rows does.

        A mean moves it as much, or a little less or more: by 2(n−1)/(2n−1) with a baseline that leaves the row itself
        out, by up to √(3/2) with a standard deviation over n − 1. The lowest of a sum is twice 2/3, at n = 2.
        """
        for _ in range(tries if size > 1 else 0):
            rows = generator.choice(pool, size=size, replace=len(pool) < size)
            try:
                once, twice = self.call(rows), self.call(np.concatenate([rows, rows]))
            except KltestError:  # it takes batches of one size only
                return False
            if once.leaves == twice.leaves and any(part.any() for part in once.parts):
                pairs = [(one, two[:size] + two[size:]) for one, two in zip(once.parts, twice.parts, strict=True)]
                return sum(float((a * b).sum()) for a, b in pairs) > MORE_THAN_A_MEAN * sum(
                    float((a * a).sum()) for a, _ in pairs
                )
        return False


def _metric(metric: Tensor | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """(N,) the logged KL of each batch of a call: the mean over its rows of what it says of rows."""
    if metric is None:
        return None
    reported = metric.numpy()
    if reported.ndim == 0:
        return reported.reshape(1)
    return reported.reshape(-1, shape[-1]).mean(axis=1) if reported.ndim == 1 else None


def groups_of(instance: Instance, sampler: str, size: int) -> Iterator[tuple[np.ndarray, float]]:
    """Every group of `size` rollouts of one prompt, their order aside, as rows, and its probability."""
    for pool, chances, prompt in _pools(instance, sampler, grouped=True):
        for rows, orders in _drawn(pool, size, ordered=False):
            yield np.array(rows), prompt * orders * float(chances[list(rows)].prod())


def _pools(instance: Instance, sampler: str, grouped: bool) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """(rows, every row's chance of being drawn, the pool's own probability): one pool, or for groups one a prompt."""
    weights, prompt = instance.rollout_weights(sampler), instance.paths.prompt
    if not grouped:
        return [(np.arange(len(weights)), weights, 1.0)]
    chances = weights / instance.environment.prompts[prompt]
    return [
        (np.flatnonzero(prompt == which), chances, float(instance.environment.prompts[which]))
        for which in np.unique(prompt)
    ]


def _drawn(pool: np.ndarray, size: int, ordered: bool) -> Iterator[tuple[tuple[int, ...], float]]:
    """Batches as rows, with the number of orders that each stands for."""
    if ordered:
        yield from ((rows, 1.0) for rows in product(pool.tolist(), repeat=size))
        return
    for rows in combinations_with_replacement(pool.tolist(), size):
        repeats = math.prod(math.factorial(times) for times in Counter(rows).values())
        yield rows, math.factorial(size) / repeats


def centred(rollout: Rollout) -> Tensor:
    """(B,) the reward less its mean over the rows of the same group."""
    reward, group = rollout.peek("reward"), rollout.peek("group")
    same = (group[:, None] == group[None, :]).to(reward.dtype)
    return reward - same @ reward / same.sum(dim=1)
