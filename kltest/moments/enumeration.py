"""The exact expected gradient and the exact per-rollout variance of any loss, over every rollout of an environment."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance, Paths
from kltest.errors import KltestError, UsageError
from kltest.loss.calling import Loss
from kltest.moments.differentiate import RowGradients, differentiate
from kltest.moments.dynamic_programming import from_tables, works_token_by_token
from kltest.moments.moments import Expectation, Moments, Reduction
from kltest.moments.projection import Projection
from kltest.moments.reduction import Witness, probe
from kltest.moments.tolerances import near_rows
from kltest.rollout import Rollout

Reports = tuple[np.ndarray | None, np.ndarray | None]
# More rollouts than this are called in large batches, if the loss treats rows apart.
ONE_BY_ONE = 300
MOST_SINGLES = 20_000
# Numbers in one field of a chunk: few enough to stay in the processor's cache from one operation to the next.
CHUNK = 2**17
POOL = 3
SPOT_CHECKS = 2


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
        witness = probe(loss, pool, generator, few=True)
        if witness.reduction != "coupled":
            moments = _in_chunks(witness, instance, sampler, padding, generator)
            if moments is not None:
                return moments
        if len(paths) > MOST_SINGLES:
            raise UsageError(
                f"{loss.name} couples the rows of a batch ({witness.coupling}), so that each rollout must be called "
                f"alone; environment {instance.environment.name!r} has {len(paths)} and at most {MOST_SINGLES} are. "
                "Use a smaller environment"
            )
        coupling = witness.coupling
        witness = Witness(loss, Rollout.of(instance, sampler=sampler, padding=padding), coupling=coupling)
        witness.mean = witness.sum = not coupling
    else:
        base = Rollout.of(instance, sampler=sampler, padding=padding)
        witness = Witness(loss, base)
        if known not in (None, "coupled") and (moments := _as_known(witness, known, instance, sampler, generator)):
            return moments
        witness = probe(loss, base, generator, few=loss.costly or known is not None)
        if known not in (None, witness.reduction):
            witness = probe(loss, base, generator)
        witness.look(list(range(len(paths))))
    return _one_by_one(witness, instance, sampler)


def exact_known(loss: Loss, instance: Instance, sampler: str, reduction: Reduction, *, padding: int = 0) -> Moments:
    """Exact moments as `exact` has them, of a loss whose reduction is known from other environments.

    If it treats rows apart, all rollouts are called in large batches, and rows of them alone again; if they differ
    there, or if the loss couples rows, each is called alone.
    """
    witness = Witness(loss, Rollout.of(instance, sampler=sampler, padding=padding))
    witness.mean, witness.sum = reduction in ("mean", "per-row"), reduction == "sum"
    generator = np.random.default_rng(padding)
    moments = _in_chunks(witness, instance, sampler, padding, generator) if reduction != "coupled" else None
    return moments or _one_by_one(witness, instance, sampler)


def _pool(paths: Paths, generator: np.random.Generator) -> np.ndarray:
    """A few rows that differ in every way in which rollouts can: length, prompt, tokens."""
    chosen = generator.choice(len(paths), size=POOL, replace=False)
    if paths.padded:
        chosen = np.append(chosen, [paths.lengths.argmin(), paths.lengths.argmax()])
    if len(ends := np.unique(paths.prompt[[0, -1]])) > 1:
        mates = [generator.choice(np.flatnonzero(paths.prompt == prompt), size=2) for prompt in ends]
        chosen = np.append(chosen, np.concatenate(mates))
    return np.unique(chosen)


def _in_chunks(
    witness: Witness, instance: Instance, sampler: str, padding: int, generator: np.random.Generator
) -> Moments | None:
    """Large batches, each row's gradient scaled to what it gives alone; None if the rows turn out to be coupled."""
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    projection = Projection(instance.policy, distinct=instance.environment.tree)
    wide = any("logits" in single.leaves for single in witness.singles.values())
    width = paths.shape[1] * (instance.environment.vocabulary if wide else 1)
    size = max(1, CHUNK // width)
    checked = set(generator.integers(-(-len(paths) // size), size=SPOT_CHECKS).tolist())
    leaves: frozenset[str] = frozenset()
    reports: list[Reports] = []
    called: RowGradients | None = None
    for number, (rows, part) in enumerate(paths.split(size)):
        rollout = Rollout.of(instance, part, sampler=sampler, padding=padding)
        live = part.mask if part.padded else None
        factor = 1.0 if witness.reduction == "sum" else float(len(part))
        called = differentiate(witness.loss, rollout, live, factor)
        if number in checked or (witness.mean and witness.sum):
            spots = np.array([_most_moved(called), int(generator.integers(len(part)))])
            fresh = _rows_again(instance, part, spots, sampler, padding)
            for row, spot in enumerate(spots):
                alone = differentiate(witness.loss, fresh.take([row]), None if live is None else live[[spot]])
                if called.close(alone.row(0), called.row(spot)):
                    continue
                if witness.mean and witness.sum and called.close(alone.row(0), called.row(spot), 1 / factor):
                    # Until now every gradient was zero, and a sum could not be told from a mean.
                    witness.mean = False
                    return _in_chunks(witness, instance, sampler, padding, generator)
                witness.found_coupled(f"a batch of {len(part)} rollouts")
                return None
            if any(part_.any() for part_ in called.parts):
                witness.sum = witness.reduction == "sum"
        projection.add(part, weights[rows], called.by_leaf)
        leaves |= called.leaves
        reports.append(_per_row(called, part))
    assert called is not None
    return _moments(witness, projection, weights, called.dtype, leaves, reports)


def _as_known(
    witness: Witness, known: Reduction, instance: Instance, sampler: str, generator: np.random.Generator
) -> Moments | None:
    """All rows in one batch, if each gives the same among half of them, and two of them the same alone; else None."""
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    shuffled = generator.permutation(len(paths))
    try:
        whole = witness.call(shuffled.tolist())
        spots = {_most_moved(whole), int(generator.integers(len(paths)))}
        pieces = [*np.array_split(np.arange(len(paths)), 2), *(np.array([spot]) for spot in spots)]
        smaller = [(piece, witness.call(shuffled[piece].tolist())) for piece in pieces]
        one_number = whole.outcome.metric is not None and whole.outcome.metric.dim() == 0
        logged = [witness.loss.returned(witness.base.take([row])).metric for row in range(len(paths) * one_number)]
    except KltestError:  # it says so again where each is called alone
        return None
    factor = 1 if known == "sum" else len(paths)
    scaled = {leaf: factor * part for leaf, part in whole.by_leaf.items()}
    values = (whole.outcome.value, None if one_number else whole.outcome.metric)
    for piece, called in smaller:
        own = 1 if known == "sum" else len(piece)
        if called.leaves != whole.leaves or not called.close_rows(tuple(part[piece] for part in scaled.values()), own):
            return None
        parts = (called.outcome.value, None if one_number else called.outcome.metric)
        if not all(_same_rows(one, other, piece, called.dtype) for one, other in zip(parts, values, strict=True)):
            return None
    witness.mean, witness.sum = known != "sum", known == "sum"
    projection = Projection(instance.policy, distinct=instance.environment.tree)
    order = np.argsort(shuffled)
    projection.add(paths, weights, {leaf: part[order] for leaf, part in scaled.items()})
    told, metric = (None if each is None else each[order] for each in _per_row(whole, paths.take(shuffled)))
    if one_number:
        numbers = [number for number in logged if number is not None and number.dim() == 0]
        if len(numbers) < len(paths):
            return None
        metric = torch.stack(numbers).numpy()
    moments = _moments(witness, projection, weights, whole.dtype, whole.leaves, [(told, metric)])
    return replace(moments, reduction=known)


def _same_rows(part: Tensor | None, whole: Tensor | None, rows: np.ndarray, dtype: str) -> bool:
    """True if a part of a batch reports, row by row, what the whole reports for these rows, or if neither does."""
    if part is None or whole is None:
        return part is whole
    return part.dim() == whole.dim() and near_rows(part.numpy(), whole.numpy()[rows], dtype)


def _one_by_one(witness: Witness, instance: Instance, sampler: str) -> Moments:
    """Every rollout as a batch of its own: the definition."""
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    projection = Projection(instance.policy, distinct=instance.environment.tree)
    singles = [witness.single(row) for row in range(len(paths))]
    for used in ({"logp"}, {"logits"}, {"logp", "logits"}):
        index = [row for row, single in enumerate(singles) if single.leaves == used]
        if index:
            stacked = {leaf: np.concatenate([singles[row].by_leaf[leaf] for row in index]) for leaf in used}
            projection.add(paths.take(np.array(index)), weights[index], stacked)
    leaves = frozenset[str]().union(*(single.leaves for single in singles))
    reports = [_per_row(single, paths.take(np.array([row]))) for row, single in enumerate(singles)]
    return _moments(witness, projection, weights, singles[0].dtype, leaves, reports)


def _moments(
    witness: Witness,
    projection: Projection,
    weights: np.ndarray,
    dtype: str,
    leaves: frozenset[str],
    reports: list[Reports],
) -> Moments:
    value, metric = (_expectation(column, weights) for column in zip(*reports, strict=True))
    return Moments(
        gradient=projection.gradient,
        second_moment=projection.second_moment,
        rollouts=len(weights),
        reduction=witness.reduction,
        dtype=dtype,
        leaves=leaves,
        value=value,
        metric=metric,
        coupling=witness.coupling,
    )


def _rows_again(instance: Instance, part: Paths, rows: np.ndarray, sampler: str, padding: int) -> Rollout:
    """Rows of a part once more, with the same padding and untouched by the loss."""
    if part.padded:
        return Rollout.of(instance, part, sampler=sampler, padding=padding).take(rows)
    return Rollout.of(instance, part.take(rows), sampler=sampler, padding=padding)


def _most_moved(called: RowGradients) -> int:
    """The row with the largest gradient."""
    if not called.parts:
        return 0
    part = max((np.abs(part) for part in called.parts), key=np.max)
    return int(part.argmax()) // part[0].size


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
