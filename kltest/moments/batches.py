"""The exact moments of a loss that couples the rows of a batch: over every batch of a stated small size.

Batches are those of training: rows drawn independently, or one group, rollouts of one prompt that is drawn first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import numpy as np
from torch import Tensor

from kltest.environments import Instance
from kltest.errors import UsageError, WorldError
from kltest.moments.differentiate import RowGradients, differentiate
from kltest.moments.moments import Expectation, Moments
from kltest.moments.projection import Projection
from kltest.moments.reduction import close
from kltest.rollout import Rollout
from kltest.targets.outcome import Loss

MOST_BATCHES = 30_000


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
    with np.errstate(divide="ignore"):
        log_weights = np.log(instance.rollout_weights(sampler))
    base = Rollout.of(instance, sampler=sampler, padding=padding)
    pools, log_prompts = _pools(instance, paths.prompt, grouped)
    ordered = not _order_is_free(loss, base, pools[0], size, np.random.default_rng([seed, size]))
    count = sum(len(pool) ** size if ordered else math.comb(len(pool) + size - 1, size) for pool in pools)
    if count > most:
        kind = "groups" if grouped else "batches"
        order = " in their order, which matters to this loss," if ordered else ""
        raise WorldError(
            f"environment {instance.environment.name!r} has {count:.6g} {kind} of {size} rollouts{order} and at most "
            f"{most} are enumerated. Use a smaller batch or a smaller world"
        )
    horizon = paths.tokens.shape[1]
    projection = Projection(instance.policy, tree=False)
    weights: list[float] = []
    metrics: list[float] = []
    called: RowGradients | None = None
    leaves: frozenset[str] = frozenset()
    for pool, log_prompt in zip(pools, log_prompts, strict=True):
        for rows, orders in _batches(pool, size, ordered):
            called = differentiate(loss, _batch(base, rows))
            index = list(rows)
            # The prompt is drawn once for a group, while every row's own probability includes it.
            surplus = (size - 1) * log_prompt if grouped else 0.0
            weight = orders * float(np.exp(log_weights[index].sum() - surplus))
            projection.add(
                paths.contexts[index].reshape(1, -1),
                paths.tokens[index].reshape(1, -1),
                np.array([weight]),
                None if called.logp is None else called.logp.reshape(1, size * horizon),
                None if called.logits is None else called.logits.reshape(1, size * horizon, -1),
            )
            leaves |= called.leaves
            weights.append(weight)
            if called.outcome.metric is not None and called.outcome.metric.dim() == 0:
                metrics.append(float(called.outcome.metric))
    assert called is not None
    return Moments(
        gradient=projection.gradient,
        second_moment=projection.second_moment,
        rollouts=len(paths),
        reduction="coupled",
        dtype=called.outcome.dtype,
        batch=size,
        leaves=leaves,
        takes=frozenset(loss.takes),
        metric=Expectation.of(np.array(metrics), np.array(weights)) if len(metrics) == len(weights) else None,
    )


def _pools(instance: Instance, prompt: np.ndarray, grouped: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows from which a batch is drawn, prompt by prompt for groups, and each pool's log-probability."""
    if not grouped:
        return [np.arange(len(prompt))], np.zeros(1)
    present = np.unique(prompt)
    return [np.flatnonzero(prompt == which) for which in present], np.log(instance.environment.prompts[present])


def _batches(pool: np.ndarray, size: int, ordered: bool) -> Iterator[tuple[tuple[int, ...], float]]:
    """Batches as rows, with the number of orders that each stands for."""
    if ordered:
        yield from ((rows, 1.0) for rows in product(pool.tolist(), repeat=size))
        return
    for rows in combinations_with_replacement(pool.tolist(), size):
        repeats = math.prod(math.factorial(times) for times in Counter(rows).values())
        yield rows, math.factorial(size) / repeats


def _batch(base: Rollout, rows: tuple[int, ...]) -> Rollout:
    taken = base.take(list(rows))
    return taken.replace(advantage=lambda: _centred(taken))


def _centred(rollout: Rollout) -> Tensor:
    reward, group = rollout.peek("reward"), rollout.peek("group")
    same = (group[:, None] == group[None, :]).to(reward.dtype)
    return reward - same @ reward / same.sum(dim=1)


def _order_is_free(
    loss: Loss, base: Rollout, pool: np.ndarray, size: int, generator: np.random.Generator, tries: int = 8
) -> bool:
    """Whether reordering a batch was seen to do no more than reorder the gradients of its rows."""
    for _ in range(tries if size > 1 else 0):
        rows = generator.choice(pool, size=size)
        order = generator.permutation(size)
        before = differentiate(loss, _batch(base, tuple(rows.tolist())))
        after = differentiate(loss, _batch(base, tuple(rows[order].tolist())))
        if not close(tuple(part[order] for part in before.parts), after.parts, before.tolerance):
            return False
    return True
