"""The exact expected gradient and the exact per-rollout variance of any loss, over every rollout of an environment."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from kltest.environments import Instance, Paths
from kltest.errors import KltestError, UsageError
from kltest.loss.calling import Loss
from kltest.moments.caller import Caller, Share
from kltest.moments.differentiate import RowGradients
from kltest.moments.dynamic_programming import from_tables, works_token_by_token
from kltest.moments.moments import Expectation, Moments, Reduction
from kltest.moments.projection import Projection
from kltest.moments.reduction import probe
from kltest.rollout import Rollout

Reports = tuple[np.ndarray | None, np.ndarray | None]
# More rollouts than this are called in large batches, if the loss treats rows apart.
ONE_BY_ONE = 300
MOST_SINGLES = 20_000
# Numbers in one field of a chunk: few enough to stay in the processor's cache from one operation to the next.
CHUNK = 2**17
POOL = 3
# Chunks in which it is proved again that rows are called together.
PROVED = 2
SHARES: dict[Reduction, tuple[Share, ...]] = {"mean": ("mean",), "per-row": ("mean",), "sum": ("sum",), "coupled": ()}


def exact(
    loss: Loss,
    instance: Instance,
    sampler: str = "current",
    *,
    padding: int = 0,
    seed: int = 0,
    known: Reduction | None = None,
) -> Moments:
    """Exact E[ĝ] and E‖ĝ‖² of a batch of one rollout: the sum over all rollouts of p(i)·ĝ(i) and p(i)·‖ĝ(i)‖².

    First the loss is called on single rollouts, pairs and larger batches, to learn how it combines rows. Then each
    rollout is called alone, which is the definition. More than ONE_BY_ONE rollouts are called in large batches instead,
    if the loss was seen to treat rows apart; single ones are compared again. A registered estimator that works token
    by token is called once for each context and token (kltest.moments.dynamic_programming).

    Args:
        loss: The loss, bound to a rollout's fields.
        instance: Environment with policy, reference and sampler, C contexts and V tokens.
        sampler: "current" draws rollouts from the policy, "stale" from the sampler.
        padding: Seed of what stands at padded positions.
        seed: Seed of the rows on which the loss is tried.
        known: How the loss combines the rows of another instance, or of another sampler. If it treated them apart, all
            rollouts are then called in one batch, in two halves of it, and a few alone; only if these differ is each
            called alone, or if it logs one number a call, which takes no gradient.

    Returns:
        Moments of the gradient with respect to logits (C, V).

    Raises:
        BatchOfOneError: The loss cannot be called with one rollout.
        NonDeterministicError: The loss gives one batch two gradients.
        TargetError: The loss fails, or its gradient is not finite.
        UsageError: The loss couples rows, and there are more than MOST_SINGLES rollouts.
        InvalidEnvironmentError: The environment cannot be enumerated.
    """
    paths = instance.paths
    if len(paths) > ONE_BY_ONE and works_token_by_token(loss, instance):
        return from_tables(loss, instance, sampler, padding, seed)
    generator = np.random.default_rng([seed, len(paths)])
    if len(paths) > ONE_BY_ONE:
        pool = Rollout.of(instance, paths.take(_pool(paths, generator)), sampler=sampler, padding=padding)
        caller = probe(loss, pool, generator, few=True)
        if moments := _in_chunks(caller, instance, sampler, padding, generator):
            return moments
        if len(paths) > MOST_SINGLES:
            raise UsageError(
                f"{loss.name} couples the rows of a batch ({caller.coupling}), so that each rollout must be called "
                f"alone; environment {instance.environment.name!r} has {len(paths)} and at most {MOST_SINGLES} are. "
                "Use a smaller environment"
            )
        caller.take_from(Rollout.of(instance, sampler=sampler, padding=padding))
    else:
        base = Rollout.of(instance, sampler=sampler, padding=padding)
        if known not in (None, "coupled") and (moments := _as_known(loss, known, instance, sampler, padding)):
            return moments
        caller = probe(loss, base, generator, few=loss.costly or known is not None)
        if known not in (None, caller.reduction):
            caller = probe(loss, base, generator)
        caller.look(list(range(len(paths))))
    return _one_by_one(caller, instance, sampler)


def exact_known(loss: Loss, instance: Instance, sampler: str, reduction: Reduction, *, padding: int = 0) -> Moments:
    """Exact moments as `exact` has them, of a loss whose reduction is known from other environments.

    If it treats rows apart, all rollouts are called in large batches, and some of them again; if they differ there, or
    if the loss couples rows, each is called alone.
    """
    caller = Caller(loss, Rollout.of(instance, sampler=sampler, padding=padding))
    caller.shares = SHARES[reduction]
    found = _in_chunks(caller, instance, sampler, padding, np.random.default_rng(padding))
    return found or _one_by_one(caller, instance, sampler)


def _pool(paths: Paths, generator: np.random.Generator) -> np.ndarray:
    """A few rows that differ in every way in which rollouts can: length, prompt, tokens."""
    chosen = generator.choice(len(paths), size=POOL, replace=False)
    if paths.padded:
        chosen = np.append(chosen, [paths.lengths.argmin(), paths.lengths.argmax()])
    if len(ends := np.unique(paths.prompt[[0, -1]])) > 1:
        mates = [generator.choice(np.flatnonzero(paths.prompt == prompt), size=2) for prompt in ends]
        chosen = np.append(chosen, np.concatenate(mates))
    return np.unique(chosen)


def _as_known(loss: Loss, known: Reduction, instance: Instance, sampler: str, padding: int) -> Moments | None:
    """Moments from one call of all rows, if it is seen to combine them as is known; else None."""
    caller = Caller(loss, Rollout.of(instance, sampler=sampler, padding=padding))
    caller.shares = SHARES[known]
    try:
        found = _in_chunks(caller, instance, sampler, padding, np.random.default_rng(padding), reports=True)
    except KltestError:  # it says so again where each is called alone
        return None
    return found and replace(found, reduction=known)


def _in_chunks(
    caller: Caller,
    instance: Instance,
    sampler: str,
    padding: int,
    generator: np.random.Generator,
    *,
    reports: bool = False,
) -> Moments | None:
    """Large batches, each row's gradient scaled to what it gives alone; None if the rows turn out to be coupled.

    With `reports` what the loss reports has to be a row's own, too; one logged number a call is taken from a call each.
    """
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    projection = Projection(instance.policy, distinct=instance.environment.tree)
    width = paths.shape[1] * (instance.environment.vocabulary if caller.wide else 1)
    size = max(1, CHUNK // width)
    checked = set(generator.integers(-(-len(paths) // size), size=PROVED).tolist())
    leaves: frozenset[str] = frozenset()
    found: list[Reports] = []
    for number, (rows, part) in enumerate(paths.split(size)):
        if not caller.shares:
            return None
        caller.take_from(Rollout.of(instance, part, sampler=sampler, padding=padding))
        # Until a gradient is not zero, a sum cannot be told from a mean.
        prove = number in checked or len(caller.shares) > 1
        called = caller.joint(np.arange(len(part))[:, None], generator, prove=prove, reports=reports)
        if called is None:
            if not caller.shares:
                caller.found_coupled(f"a batch of {len(part)} rollouts")
            return None
        projection.add(part, weights[rows], called.by_leaf)
        leaves |= called.leaves
        value, metric = _per_row(called, part)
        if reports and called.outcome.metric is not None and called.outcome.metric.dim() == 0:
            each = [caller.loss.returned(caller.base.take([row])).metric for row in range(len(part))]
            numbers = [number.numpy() for number in each if number is not None and number.dim() == 0]
            if len(numbers) < len(part):
                return None
            metric = np.stack(numbers)
        found.append((value, metric))
    return _moments(caller, projection, weights, leaves, found)


def _one_by_one(caller: Caller, instance: Instance, sampler: str) -> Moments:
    """Every rollout as a batch of its own: the definition."""
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    projection = Projection(instance.policy, distinct=instance.environment.tree)
    singles = [caller.single(row) for row in range(len(paths))]
    for used in ({"logp"}, {"logits"}, {"logp", "logits"}):
        index = [row for row, single in enumerate(singles) if single.leaves == used]
        if index:
            stacked = {leaf: np.concatenate([singles[row].by_leaf[leaf] for row in index]) for leaf in used}
            projection.add(paths.take(np.array(index)), weights[index], stacked)
    leaves = frozenset[str]().union(*(single.leaves for single in singles))
    reports = [_per_row(single, paths.take(np.array([row]))) for row, single in enumerate(singles)]
    return _moments(caller, projection, weights, leaves, reports)


def _moments(
    caller: Caller, projection: Projection, weights: np.ndarray, leaves: frozenset[str], reports: list[Reports]
) -> Moments:
    value, metric = (_expectation(column, weights) for column in zip(*reports, strict=True))
    return Moments(
        gradient=projection.gradient,
        second_moment=projection.second_moment,
        rollouts=len(weights),
        reduction=caller.reduction,
        dtype=caller.dtype,
        leaves=leaves,
        value=value,
        metric=metric,
        coupling=caller.coupling,
    )


def _per_row(called: RowGradients, paths: Paths) -> Reports:
    """The value and the logged KL (B,) of each rollout, summed over its tokens; None if it cannot be told."""

    def of(reported: Tensor | None) -> np.ndarray | None:
        if reported is None:
            return None
        found = reported.numpy()
        if found.ndim == 2:
            return (np.where(paths.mask, found, 0.0) if paths.padded else found) @ np.ones(paths.shape[1])
        return found.reshape(-1) if found.size == len(paths) else None

    return of(called.outcome.value), of(called.outcome.metric)


def _expectation(values: Sequence[np.ndarray | None], weights: np.ndarray) -> Expectation | None:
    known = [value for value in values if value is not None]
    return Expectation.of(np.concatenate(known), weights) if len(known) == len(values) else None
