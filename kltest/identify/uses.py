"""Uses of a rollout by a loss: the fields that it reads, and the influence of the sampler's log-probs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
from torch import Tensor

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.moments.differentiate import at_leaves
from kltest.rollout import SAMPLER_FIELDS, Rollout

# Lengths differ there, so that masks matter.
ENVIRONMENT = "ragged"
# Far, and nearer than the tightest clip in use: a clipped ratio may be saturated at one of the two.
DISTANCES = (0.3, 1e-6)
# Relative to the largest entry: above rounding in float64, below the effect of the smaller of the two distances. A loss
# in lower precision may count as influenced for its rounding alone: then both samplers are graded.
SAME = 1e-10
# Groups of two, three, four and six divide this number of rollouts.
ROWS = 12


def fields_used(loss: Loss, seed: int) -> frozenset[str]:
    """Return the fields that a loss takes by a parameter or reads from the rollout, in one call with four rollouts."""
    rollout = Rollout.of(instances(ENVIRONMENT, seed)[0], padding=seed).take([0, 3, 7, 11])
    with suppress(KltestError):  # a loss that fails is reported when it is measured
        loss(rollout)
    return frozenset(loss.takes) | frozenset(rollout.accessed)


def sampler_matters(loss: Loss, used: frozenset[str], seed: int) -> bool:
    """Return True if gradient, value or logged value change with the sampler's log-probs, or if that cannot be tried.

    The whole loss counts, not its KL part: a policy loss with a ratio depends on the sampler even if its KL does not.

    Args:
        loss: The loss.
        used: The fields that it uses, from `fields_used`.
        seed: Seed of the instance, its padding and the changes.
    """
    if not used & SAMPLER_FIELDS:
        return False
    instance = instances(ENVIRONMENT, seed)[0]
    generator = np.random.default_rng(seed)
    try:
        for start, distance in zip((instance.sampler, instance.policy), DISTANCES, strict=True):
            moved = table(start + distance * generator.standard_normal(start.shape))
            one, other = (_results(loss, replace(instance, sampler=sampler), seed) for sampler in (start, moved))
            if not all(_same(*pair) for pair in zip(one, other, strict=True)):
                return True
    except (KltestError, ValueError):  # it fails, or logs a KL in one call only: graded under both samplers
        return True
    return False


def _results(loss: Loss, instance: Instance, seed: int) -> list[Tensor]:
    """Return the returned value, the logged value if there is one, and gradients of one batch."""
    lengths = instance.paths.lengths
    rollout = Rollout.of(instance, sampler="stale", padding=seed, centre="batch").take(np.argsort(lengths)[:ROWS])
    with preserved(seed):
        result = loss.for_experiments().returned(rollout)
    found = [result.loss.detach(), *([] if result.metric is None else [result.metric])]
    if result.loss.requires_grad:
        found += at_leaves(loss, result.loss.sum(), rollout)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = one.double(), other.double()
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= SAME * float(one.abs().max()))
