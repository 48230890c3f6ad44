"""What a loss makes use of: the fields that it takes or reads, and whether the sampler's log-probs change anything."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Loss
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import LEAVES, SAMPLER_FIELDS, Rollout

WORLD = "ragged"
# Far, and nearer than the tightest clip in use: a clipped ratio may be saturated at one of the two.
DISTANCES = (0.3, 1e-6)
# Relative to the largest entry: above rounding in float64, and below what the smaller of the two distances changes.
SAME = 1e-10
# As many rollouts as groups of two, three, four or six divide.
ROWS = 12


def fields_used(loss: Loss, seed: int) -> frozenset[str]:
    """The fields that a loss takes by a parameter or reads from the rollout, seen on a batch of several."""
    rollout = Rollout.of(instances(WORLD, seed)[0], padding=seed).take([0, 3, 7, 11])
    with suppress(KltestError):  # whatever is wrong with the loss comes out when it is measured
        loss(rollout)
    return frozenset(loss.takes) | frozenset(rollout.accessed)


def sampler_matters(loss: Loss, used: frozenset[str], seed: int) -> bool:
    """Whether gradient, value or logged value change with the sampler's log-probs; yes where that cannot be seen.

    The whole loss is meant, not its KL part: a policy loss with a ratio knows of the sampler though its KL does not.
    """
    if not used & SAMPLER_FIELDS:
        return False
    instance = instances(WORLD, seed)[0]
    generator = np.random.default_rng(seed)
    try:
        for start, distance in zip((instance.sampler, instance.policy), DISTANCES, strict=True):
            moved = table(start + distance * generator.standard_normal(start.shape))
            one, other = (_answers(loss, replace(instance, sampler=sampler), seed) for sampler in (start, moved))
            if not all(_same(*pair) for pair in zip(one, other, strict=True)):
                return True
    except (KltestError, ValueError):  # what cannot be called, or logs a KL in one call only, is looked at both ways
        return True
    return False


def _answers(loss: Loss, instance: Instance, seed: int) -> list[Tensor]:
    """What a batch returns and logs, and the gradients that it gives."""
    lengths = instance.paths.lengths
    rollout = Rollout.of(instance, sampler="stale", padding=seed, centre="batch").take(np.argsort(lengths)[:ROWS])
    with preserved(seed):
        result = loss.for_experiments().returned(rollout)
    found = [result.loss.detach(), *([] if result.metric is None else [result.metric])]
    if result.loss.requires_grad:
        got = leaf_gradients(loss, result.loss.sum(), rollout)
        found += [got[name] if name in got else torch.zeros_like(rollout.peek(name)) for name in LEAVES]
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = one.double(), other.double()
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= SAME * float(one.abs().max()))
