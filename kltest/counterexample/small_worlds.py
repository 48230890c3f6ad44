"""What a loss follows in a world of a few rollouts, by the definition alone: no batch is called for another's sake."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from kltest.counterexample.environment import SmallEnvironment
from kltest.environments import Instance, Paths
from kltest.identify.findings import Combination
from kltest.identify.identification import tolerance
from kltest.loss.outcome import Loss, Returned
from kltest.moments import exact_batches
from kltest.moments.differentiate import RowGradients, differentiate
from kltest.moments.projection import each_gradient
from kltest.report import CounterExample, Prefix
from kltest.rollout import Rollout
from kltest.truth import combine, gradient, gradient_again

# The two routes to the truth differ by rounding only.
ROUTES_AGREE = 1e-9


@dataclass(frozen=True)
class Measured:
    """The gradient that one batch gives: its expectation and standard deviation, (C, V) each."""

    expected: np.ndarray
    std: np.ndarray
    dtype: str
    returned: Returned


def measure(loss: Loss, instance: Instance, sampler: str, batch: int = 1, *, summed: bool = False) -> Measured:
    """Over every rollout as a batch of its own, or over every ordered batch of that size.

    `summed`: the loss adds up the rows of a batch, and is divided by their number.
    """
    paths, chance = instance.paths, instance.rollout_weights(sampler)
    mean, square = np.zeros(instance.policy.shape), np.zeros(instance.policy.shape)
    called: RowGradients | None = None
    for rows in product(range(len(paths)), repeat=batch):
        part = paths.take(np.array(rows))
        called = differentiate(loss, rollouts(instance, part, sampler, batch), part.mask if part.padded else None)
        reached = each_gradient(part, instance.policy, called.logp, called.logits).sum(axis=0)
        reached /= batch if summed else 1
        mean += chance[list(rows)].prod() * reached
        square += chance[list(rows)].prod() * reached**2
    assert called is not None
    return Measured(mean, np.sqrt(np.maximum(square - mean**2, 0.0)), called.dtype, called.outcome.returned)


def at_once(loss: Loss, instance: Instance, sampler: str, *, summed: bool) -> tuple[np.ndarray, str]:
    """(C, V) expected gradient of a loss that treats rows apart, and its precision, by one call on all rollouts."""
    paths = instance.paths
    factor = 1.0 if summed else float(len(paths))
    called = differentiate(loss, rollouts(instance, paths, sampler, 1), paths.mask if paths.padded else None, factor)
    each = each_gradient(paths, instance.policy, called.logp, called.logits)
    return np.einsum("n,ncv->cv", instance.rollout_weights(sampler), each), called.dtype


def rollouts(instance: Instance, paths: Paths, sampler: str, batch: int) -> Rollout:
    """A batch of rollouts; what stands at padded positions is what the root's first action would have there."""
    base = Rollout.of(instance, paths, sampler=sampler, centre="world" if batch == 1 else "batch")
    if not paths.padded:
        return base
    tables = {"": instance.policy, "ref_": instance.reference, "old_": instance.behaviour(sampler)}
    padded = {f"{prefix}logp": torch.from_numpy(paths.chosen(table)) for prefix, table in tables.items()}
    padded |= {f"{prefix}logits": torch.from_numpy(paths.everything(table)) for prefix, table in tables.items()}
    return base.replace(tokens=torch.from_numpy(paths.tokens.copy()), **padded)


def adds_up(loss: Loss, world: SmallEnvironment, sampler: str, batch: int) -> bool:
    """Whether a loss that couples rows adds them up in batches of this size; those of one are never divided."""
    return batch > 1 and exact_batches(loss, world.instance(), sampler, batch, grouped=True).added_up


def differs(found: np.ndarray, target: np.ndarray, instance: Instance, limit: float) -> bool:
    """Whether a gradient is off by more than this share of the target, or of ∇KL(π‖ref) where that is larger."""
    rounding = tolerance("float64")
    scale = max(float(np.linalg.norm(target)), float(np.linalg.norm(gradient("reverse_kl", instance))))
    # Where the policy is the reference both can be zero; then what is found is itself the measure.
    scale = scale if scale > rounding else float(np.linalg.norm(found))
    return scale > rounding and float(np.linalg.norm(found - target)) > limit * scale


def worked(
    loss: Loss,
    declared: Combination,
    world: SmallEnvironment,
    sampler: str,
    batch: int,
    limit: float,
    *,
    summed: bool = False,
) -> tuple[CounterExample, str, bool] | None:
    """The world with its numbers, the loss's precision, and whether the two gradients differ.

    None if the routes to the truth disagree.
    """
    instance = world.instance()
    measured = measure(loss, instance, sampler, batch, summed=summed)
    truth = combine(declared, instance)
    again = sum(c * gradient_again(name, instance) for name, c in declared.items())
    if np.abs(truth - again).max() > ROUTES_AGREE * max(1.0, float(np.abs(truth).max())):
        return None
    places = [
        Prefix(
            prefix=world.prefix(context),
            policy=list(world.policy[context]),
            reference=list(world.reference[context]),
            sampler=None if world.sampler is None else list(world.sampler[context]),
            reward=None if world.reward is None else list(world.reward[context]),
            truth=_plain(truth[context]),
            found=_plain(measured.expected[context]),
            std=_plain(measured.std[context]),
        )
        for context in range(len(world.policy))
    ]
    kind = "bandit" if world.length == 1 else "ragged" if world.ends else "sequence"
    shape = (world.length, len(world.policy[0]), world.ends, batch)
    differ = differs(measured.expected, truth, instance, max(limit, tolerance(measured.dtype)))
    return CounterExample(kind, sampler, *shape, measured.returned, summed, places), measured.dtype, differ


def _plain(values: np.ndarray) -> list[float]:
    """Plain numbers, without the last digits, which rounding makes, and without what it leaves of zero."""
    return [0.0 if abs(value) < 1e-15 else float(f"{value:.14g}") for value in values]
