"""The exact expected gradient and the exact per-rollout variance of any loss, over every rollout of a world."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kltest.environments import Instance, Paths
from kltest.errors import UsageError
from kltest.moments.differentiate import RowGradients
from kltest.moments.moments import Expectation, Moments
from kltest.moments.projection import Projection
from kltest.moments.reduction import Witness, probe
from kltest.rollout import Rollout
from kltest.targets.outcome import Loss

ONE_BY_ONE = 300
MOST_SINGLES = 20_000


def exact(loss: Loss, instance: Instance, sampler: str = "current", *, padding: int = 0, seed: int = 0) -> Moments:
    """E[ĝ], E‖ĝ‖² of a batch of one rollout drawn from the policy ("current") or the sampler ("stale").

    The loss is called on single rollouts, on pairs and on larger batches first, to learn how it combines rows. Where
    there are few rollouts every one is then called on its own, which is the definition; where there are many and the
    loss was seen to treat rows apart, they are called in large batches, with single ones compared again. `padding`
    seeds what stands at padded positions, `seed` the choice of probes.

    Raises BatchOfOneError for a loss that cannot be called with one rollout, TargetError where its gradient is not
    finite or not reproducible, WorldError if the world cannot be enumerated.
    """
    paths = instance.paths
    weights = instance.rollout_weights(sampler)
    base = Rollout.of(instance, sampler=sampler, padding=padding)
    witness = probe(loss, base, np.random.default_rng([seed, len(paths)]))
    return _one_by_one(witness, instance, paths, weights, base)


def _one_by_one(witness: Witness, instance: Instance, paths: Paths, weights: np.ndarray, base: Rollout) -> Moments:
    if len(paths) > MOST_SINGLES:
        raise UsageError(f"{len(paths)} rollouts are too many to call {witness.loss.name} on each of them alone")
    witness.look(list(range(len(paths))))
    singles = [witness.single(row) for row in range(len(paths))]
    projection = Projection(instance.policy, tree=instance.environment.tree)
    for name in ({"logp"}, {"logits"}, {"logp", "logits"}):
        rows = [row for row, single in enumerate(singles) if single.leaves == name]
        if rows:
            projection.add(
                paths.contexts[rows],
                paths.tokens[rows],
                weights[rows],
                *(_stack(singles, rows, leaf) if leaf in name else None for leaf in ("logp", "logits")),
            )
    mask = paths.mask
    return Moments(
        gradient=projection.gradient,
        second_moment=projection.second_moment,
        rollouts=len(paths),
        reduction=witness.reduction,
        dtype=singles[0].outcome.dtype,
        leaves=frozenset().union(*(single.leaves for single in singles)),
        takes=frozenset(witness.loss.takes),
        value=_expectation([single.outcome.value for single in singles], mask, weights),
        metric=_expectation([single.outcome.metric for single in singles], mask, weights),
        coupling=witness.coupling,
    )


def _stack(singles: list[RowGradients], rows: list[int], leaf: str) -> np.ndarray:
    return np.concatenate([getattr(singles[row], leaf) for row in rows])


def _expectation(values: list[Tensor | None], mask: np.ndarray, weights: np.ndarray) -> Expectation | None:
    """Per-token values are summed over live tokens."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    rows = [
        float(np.where(live, value.numpy()[0], 0.0).sum()) if value.dim() == 2 else float(value.sum())
        for value, live in zip(known, mask, strict=True)
    ]
    return Expectation.of(np.array(rows), weights)
