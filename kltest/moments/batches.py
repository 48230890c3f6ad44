"""The exact moments of a loss that couples the rows of a batch: over every batch of a stated small size.

Batches are those of training: rows drawn independently, or one group, rollouts of one prompt that is drawn first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, islice, product

import numpy as np
from torch import Tensor

from kltest.environments import Instance, Paths
from kltest.errors import UsageError, WorldError
from kltest.moments.agreement import close
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.moments.moments import Expectation, Moments
from kltest.moments.projection import Projection
from kltest.rollout import LEAVES, Rollout
from kltest.targets.outcome import Loss

MOST_BATCHES = 30_000
# Batches whose gradients are kept until they are added up together.
KEPT = 500


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
    its probability; a loss that is seen not to care for the order of rows is called once for each multiset.
    Raises WorldError, with the number of batches, when there are more than `most`.
    """
    if size < 1:
        raise UsageError(f"a batch has at least one rollout, not {size}")
    paths = instance.paths
    batches = _Batches(loss, Rollout.of(instance, sampler=sampler, padding=padding))
    pools = _pools(instance, sampler, grouped)
    ordered = not batches.order_is_free(pools[0][0], size, np.random.default_rng([seed, size]))
    count = sum(len(pool) ** size if ordered else math.comb(len(pool) + size - 1, size) for pool, _, _ in pools)
    if count > most:
        kind = "groups" if grouped else "batches"
        order = " in their order, which matters to this loss," if ordered else ""
        raise WorldError(
            f"environment {instance.environment.name!r} has {count:.6g} {kind} of {size} rollouts{order} and at most "
            f"{most} are enumerated. Use a smaller batch or a smaller world"
        )
    projection = Projection(instance.policy, distinct=False)
    leaves: frozenset[str] = frozenset()
    weights: list[np.ndarray] = []
    metrics: list[Tensor | None] = []
    dtype = "float64"
    for pool, chances, prompt in pools:
        drawn = iter(_drawn(pool, size, ordered))
        while kept := list(islice(drawn, KEPT)):
            rows = np.array([batch for batch, _ in kept])
            weight = prompt * chances[rows].prod(axis=1) * np.array([orders for _, orders in kept])
            called = [batches.call(batch) for batch in rows]
            # A batch is one long rollout whose tokens share contexts.
            shape = (len(kept), -1)
            long = Paths(
                paths.contexts[rows].reshape(shape),
                paths.tokens[rows].reshape(shape),
                paths.mask[rows].reshape(shape),
                paths.prompt[rows[:, 0]],
                np.log(weight),
            )
            for reached in {one.leaves for one in called}:
                index = [i for i, one in enumerate(called) if one.leaves == reached]
                stacked = {
                    leaf: np.stack([getattr(called[i], leaf) for i in index]) for leaf in LEAVES if leaf in reached
                }
                logp, logits = stacked.get("logp"), stacked.get("logits")
                projection.add(
                    long.take(np.array(index)),
                    weight[index],
                    None if logp is None else logp.reshape(len(index), -1),
                    None if logits is None else logits.reshape(len(index), -1, logits.shape[-1]),
                )
                leaves |= reached
            weights.append(weight)
            metrics += [one.outcome.metric for one in called]
            dtype = called[-1].outcome.dtype
    scalars = [float(metric) for metric in metrics if metric is not None and metric.dim() == 0]
    return Moments(
        gradient=projection.gradient,
        second_moment=projection.second_moment,
        rollouts=len(paths),
        reduction="coupled",
        dtype=dtype,
        batch=size,
        leaves=leaves,
        takes=frozenset(loss.takes),
        metric=Expectation.of(np.array(scalars), np.concatenate(weights)) if len(scalars) == len(metrics) else None,
    )


class _Batches:
    """Calls a loss on batches of known rows."""

    def __init__(self, loss: Loss, base: Rollout) -> None:
        self.loss = loss
        self.base = base
        self.live = live_positions(base)

    def call(self, rows: np.ndarray) -> RowGradients:
        taken = self.base.take(rows)
        batch = taken.replace(advantage=lambda: _centred(taken))
        return differentiate(self.loss, batch, None if self.live is None else self.live[rows])

    def order_is_free(self, pool: np.ndarray, size: int, generator: np.random.Generator, tries: int = 8) -> bool:
        """Whether reordering a batch was seen to do no more than reorder the gradients of its rows."""
        for _ in range(tries if size > 1 else 0):
            rows, order = generator.choice(pool, size=size), generator.permutation(size)
            before, after = self.call(rows), self.call(rows[order])
            if not close(tuple(part[order] for part in before.parts), after.parts, before.dtype):
                return False
        return True


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


def _centred(rollout: Rollout) -> Tensor:
    reward, group = rollout.peek("reward"), rollout.peek("group")
    same = (group[:, None] == group[None, :]).to(reward.dtype)
    return reward - same @ reward / same.sum(dim=1)
