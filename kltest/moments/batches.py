"""Exact moments of a loss that couples the rows of a batch: over every batch of a stated small size.

Batches are those of training: rows drawn independently, or one group, rollouts of one prompt that is drawn first.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from itertools import chain, combinations_with_replacement, islice, product
from typing import Any

import numpy as np

from kltest.environments import Instance, Paths
from kltest.errors import InvalidEnvironmentError, KltestError, UsageError
from kltest.loss.calling import Loss
from kltest.moments.caller import Caller
from kltest.moments.moments import Combining, Moments
from kltest.moments.reduction import NonDeterministicError
from kltest.moments.totals import Totals
from kltest.rollout import Rollout

MOST_BATCHES = 30_000
# Batches whose gradients are held in memory at once.
CHUNK = 500
# Batches that are called in two orders, of each instance at least one.
TRIES = 4
# If several groups share one call, this many times as many groups are enumerated.
TOGETHER = 20
# Doubling a batch multiplies the gradient of a mean by √(3/2) = 1.22 at most and that of a sum by 4/3 at least: see
# `adds_up`.
MORE_THAN_A_MEAN = 1.28


def exact_batches(loss: Loss, instance: Instance, sampler: str = "current", size: int = 2, **options: Any) -> Moments:
    """Return the moments of `exact_batches_each` on one instance."""
    return exact_batches_each(loss, [instance], sampler, size, **options)[0]


def exact_batches_each(
    loss: Loss,
    instances: Sequence[Instance],
    sampler: str = "current",
    size: int = 2,
    *,
    grouped: bool = False,
    padding: int = 0,
    seed: int = 0,
    most: int = MOST_BATCHES,
    known: Combining | None = None,
    logs: bool = True,
) -> list[Moments]:
    """E[ĝ] and E‖ĝ‖² of the gradient ĝ of a batch of `size` rollouts, on each of several instances.

    E[ĝ] = Σ over ordered batches (i₁, …, i_n) of p(i₁)⋯p(i_n)·ĝ(i₁, …, i_n). A loss that was seen to ignore the order
    of rows is called once for each multiset; one that was seen to keep the groups of a call apart is given many groups
    in one call, as are batches whose rows have the same lengths if those are kept apart. Batches of all instances share
    these calls, and what was seen.

    Args:
        loss: The loss, bound to a rollout's fields.
        instances: Environments with policy, reference and sampler; of one horizon and vocabulary.
        sampler: "current" draws rollouts from the policy, "stale" from the sampler.
        size: Rollouts in a batch.
        grouped: A batch is a group, rollouts of one prompt; else its rows are independent. `advantage` is the reward
            minus its mean over the batch's rows of the same prompt.
        padding: Seed of what stands at padded positions.
        seed: Seed of the batches on which order and separation are tried.
        most: The most batches of an instance to enumerate, TOGETHER times as many if calls are of many groups.
        known: How the loss combines other batches of this size: only the first call of many is then compared with calls
            of few. None: it is tried, and each call is.
        logs: False if the expectation of the logged KL is not asked for.

    Returns:
        Moments with respect to logits (C, V). `added_up` is True if the loss sums over rows instead of averaging.

    Raises:
        UsageError: `size` is below 1.
        InvalidEnvironmentError: There are more than `most` batches; the message has their number.
        NonDeterministicError: The loss gives one batch two gradients.
    """
    if size < 1:
        raise UsageError(f"a batch has at least one rollout, not {size}")

    paths = Paths.joined([instance.paths for instance in instances])
    rollouts = [Rollout.of(instance, sampler=sampler, padding=padding) for instance in instances]
    caller = Caller(loss, Rollout.joined(rollouts), batches=True, logs=logs)
    pools = [_pools(instance, sampler, grouped) for instance in instances]
    starts = np.cumsum([0, *(len(instance.paths) for instance in instances)])
    tried = [start + own[0][0] for start, own in zip(starts, pools, strict=False)]
    generator = np.random.default_rng([seed, size])
    ordered = known.ordered if known else not order_is_free(caller, tried, size, generator)
    if known:
        caller.together = known.together
    elif not ordered:
        caller.try_together(tried[0], size, generator)
    for instance, own in zip(instances, pools, strict=True):
        count = sum(len(pool) ** size if ordered else math.comb(len(pool) + size - 1, size) for pool, _, _ in own)
        if count > most * (TOGETHER if caller.together == "any" else 1):
            kind = "groups" if grouped else "batches"
            order = " in their order, which matters to this loss," if ordered else ""
            raise InvalidEnvironmentError(
                f"environment {instance.environment.name!r} has {Decimal(count):.6g} {kind} of {size} rollouts{order} "
                f"and at most {most} are enumerated. Use a smaller batch or a smaller environment"
            )
    totals, called = [Totals(instance, distinct=False) for instance in instances], 0
    drawn = (
        (place, start + pool[chosen], prompt * chances[pool[chosen]].prod(axis=1) * orders)
        for place, (start, own) in enumerate(zip(starts, pools, strict=False))
        for pool, chances, prompt in own
        for chosen, orders in (tuples if ordered else multisets)(len(pool), size, CHUNK)
    )
    for owner, rows, weight in _chunks(drawn):
        joined = joint_paths(paths, rows, np.log(weight))
        for part in caller.gradients(rows, generator, prove=not (known and called)):
            for place in np.unique(owner[part.index]):
                mine = part.some(owner[part.index] == place)
                totals[place].add(joined, weight, mine, called)
        called += len(rows)
    combining = known or Combining(ordered, caller.together, added_up=False)
    found = [one.moments(caller, reduction="coupled", batch=size, combining=combining) for one in totals]
    moving = next((place for place, one in enumerate(found) if one.gradient.any()), None)
    if known is None and moving is not None and adds_up(caller, tried[moving], size, generator):
        options: dict[str, Any] = {"grouped": grouped, "padding": padding, "seed": seed, "most": most}
        of_size = partial(exact_batches, loss, instances[moving], sampler, known=combining, logs=False, **options)
        if _grows(found[moving].gradient, size, of_size):
            return [replace(one, combining=replace(combining, added_up=True)) for one in found]
    return found


def _chunks(drawn: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield (instance, rows, probability) of batches, CHUNK of them at a time."""
    kept: list[tuple[np.ndarray, ...]] = []
    for place, rows, weight in drawn:
        kept.append((np.full(len(rows), place), rows, weight))
        while (many := sum(len(part[0]) for part in kept)) >= CHUNK:
            whole = tuple(map(np.concatenate, zip(*kept, strict=True)))
            yield tuple(part[:CHUNK] for part in whole)
            kept = [tuple(part[CHUNK:] for part in whole)] if many > CHUNK else []
    if kept:
        yield tuple(map(np.concatenate, zip(*kept, strict=True)))


def order_is_free(caller: Caller, pools: Sequence[np.ndarray], size: int, generator: np.random.Generator) -> bool:
    """True if reordering a batch does no more than reorder the gradients of its rows, in a few batches of the pools.

    Orders are random ones, and in turn the two that make all others: the first two rows swapped, and all moved by one.
    """
    swapped, moved = np.arange(size), np.roll(np.arange(size), 1)
    swapped[:2] = swapped[:2][::-1]
    for attempt in range(max(TRIES, len(pools)) if size > 1 else 0):
        rows, order = generator.choice(pools[attempt % len(pools)], size=size), generator.permutation(size)
        before, after = caller.call(rows), caller.call(rows[order])
        if attempt == 0 and not before.close(before.parts, caller.call(rows).parts):
            raise NonDeterministicError.of(caller.loss, partial(caller.call, rows))
        if not before.close(tuple(part[order] for part in before.parts), after.parts):
            return False
        known = (moved, swapped)[attempt % 2]
        if size > 2 and not before.close(tuple(part[known] for part in before.parts), caller.call(rows[known]).parts):
            return False
    return True


def adds_up(caller: Caller, pool: np.ndarray, size: int, generator: np.random.Generator, tries: int = 3) -> bool:
    """True if a batch with every row twice moves each rollout about twice as much, as a sum over rows does.

    A mean moves it as much, or a little less or more: by 2(n−1)/(2n−1) with a baseline that leaves the row itself out,
    by up to √(3/2) with a standard deviation over n − 1. The lowest of a sum is twice 2/3, at n = 2.
    """
    for _ in range(tries if size > 1 else 0):
        rows = generator.choice(pool, size=size, replace=len(pool) < size)
        try:
            once, twice = caller.call(rows), caller.call(np.concatenate([rows, rows]))
        except KltestError:  # the loss takes batches of one size only
            return False
        if once.leaves == twice.leaves and any(part.any() for part in once.parts):
            pairs = [(one, two[:size] + two[size:]) for one, two in zip(once.parts, twice.parts, strict=True)]
            return sum(float((a * b).sum()) for a, b in pairs) > MORE_THAN_A_MEAN * sum(
                float((a * a).sum()) for a, _ in pairs
            )
    return False


def joint_paths(paths: Paths, rows: np.ndarray, log_weight: np.ndarray) -> Paths:
    """Batches (N, n) of rows, each as one long rollout of n·T tokens.

    The gradient of a batch is a sum over its tokens, as a rollout's is: so it is projected like that of one rollout,
    in which tokens share contexts.
    """
    shape = (len(rows), -1)
    contexts, tokens, mask = (part[rows].reshape(shape) for part in (paths.contexts, paths.tokens, paths.mask))
    return Paths(contexts, tokens, mask, paths.prompt[rows[:, 0]], log_weight)


def _grows(gradient: np.ndarray, size: int, of_size: Callable[[int], Moments]) -> bool:
    """True if the expected gradient is about proportional to the batch size, or if no other size can be measured.

    A batch may look like a sum and be none in expectation: (Σ_i u_i)²/2n has cross terms, which vanish on average.
    """
    norm = float((gradient**2).sum())
    for other in (size - 1, size + 1):
        try:
            found = of_size(other).gradient
        except KltestError:  # the loss takes batches of one size only, or there are too many of the other size
            continue
        # A sum goes as other/size, or further if rows are compared with each other; a mean stays at 1. The bound lies
        # between them, at the square root.
        away, halfway = float((found * gradient).sum()), norm * (other / size) ** 0.5
        return away > halfway if other > size else away < halfway
    return True


def groups_of(instance: Instance, sampler: str, size: int) -> Iterator[tuple[np.ndarray, float]]:
    """Every multiset of `size` rows of `instance.paths` of one prompt, and its probability in any order."""
    for pool, chances, prompt in _pools(instance, sampler, grouped=True):
        for places, orders in multisets(len(pool), size, CHUNK):
            for rows, times in zip(pool[places], orders, strict=True):
                yield rows, prompt * float(times) * float(chances[rows].prod())


def _pools(instance: Instance, sampler: str, grouped: bool) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """(rows, probability of each row within its pool, probability of the pool); for groups one pool a prompt."""
    weights, prompt = instance.rollout_weights(sampler), instance.paths.prompt
    if not grouped:
        return [(np.arange(len(weights)), weights, 1.0)]
    chances = weights / instance.environment.prompts[prompt]
    return [
        (np.flatnonzero(prompt == which), chances, float(instance.environment.prompts[which]))
        for which in np.unique(prompt)
    ]


def multisets(pool: int, size: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every multiset (N, size) of `size` of `pool` rows and in how many orders (N,) it can be drawn.

    They are sorted, and come `most` at a time.
    """
    for rows in _arrays(combinations_with_replacement(range(pool), size), size, most):
        orders, times = np.ones(len(rows)), np.ones(len(rows))
        for column in range(1, size):
            times = np.where(rows[:, column] == rows[:, column - 1], times + 1, 1)
            orders = orders * (column + 1) / times  # column by column, since 256! is no floating-point number
        yield rows, orders


def tuples(pool: int, size: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every tuple (N, size) of `size` of `pool` rows, each in one order, `most` at a time."""
    for rows in _arrays(product(range(pool), repeat=size), size, most):
        yield rows, np.ones(len(rows))


def _arrays(each: Iterator[tuple[int, ...]], size: int, most: int) -> Iterator[np.ndarray]:
    while len(rows := np.fromiter(chain.from_iterable(islice(each, most)), int).reshape(-1, size)):
        yield rows
