"""Uses of a rollout by a loss: fields that it reads, the sampler's influence, and rewards that it shapes."""

import copy
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.placement import ROW_FIELDS, reduce, with_rewards
from kltest.moments.differentiate import at_leaves, leaf_gradients
from kltest.rollout import LEAVES, SAMPLER_FIELDS, Rollout

# Lengths differ there, so that masks matter.
ENVIRONMENT = "ragged"
# Far, and nearer than the tightest clip in use: a clipped ratio may be saturated at one of the two.
DISTANCES = (0.3, 1e-6)
# Relative to the largest entry: above rounding in float64, below the effect of the smaller of the two distances. A loss
# in lower precision may count as influenced for its rounding alone: then both samplers are graded.
SAME = 1e-10
# Groups of two, three, four and six divide this number of rollouts.
ROWS = 12
# Rewards of the changed batch, all different: positive and below one, as many functions clip rewards to [-1, 1].
LOWEST, HIGHEST = 0.25, 0.75
# Largest error of a slope, for functions that compute in float32; and of a gradient that rewards do not change.
SLOPE, UNMOVED = 1e-4, 1e-6
RECOGNISED = (
    "What it returns rises by one with the reward: it is taken as a reward less a penalty, higher being better, and "
    "graded as the negative of a cost, with rewards of zero (placement shaped-reward; --placement loss prevents it)"
)
HINT = (
    "What it returns rises with the reward. If it is a reward less a penalty, higher being better, grade it with "
    "--placement shaped-reward"
)
COST = (
    "What it returns falls by one with the reward: it is a cost that contains the negative reward, and was graded with "
    "rewards of zero"
)


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


@dataclass(frozen=True)
class _Response:
    """Change of what a loss returns if rewards rise from 0 by `rise` (B,): the sums `moved` (B,) over live tokens.

    `lengths` are the numbers of live tokens, `columns` that of all. `detached`: no gradient changes with the rewards.
    """

    rise: Tensor
    moved: Tensor
    lengths: Tensor
    columns: int
    detached: bool

    @property
    def unit(self) -> int:
        """1 if each sum rises by as much as its reward, written to one token, to live ones or to all; −1 if it falls.

        0 if it does neither.
        """
        written = (torch.ones_like(self.rise), self.lengths, torch.full_like(self.rise, self.columns))
        signs = (sign for sign in (1, -1) for times in written if _equal(self.moved, sign * times * self.rise, 0.0))
        return next(signs, 0)

    @property
    def upwards(self) -> bool:
        """True if the sums rise where rewards rise, centred or scaled perhaps."""
        return float((self.moved * self.rise).sum()) > SLOPE


def as_shaped_reward(loss: Loss, seed: int) -> Loss:
    """Return the loss, as one of placement shaped-reward if a change of the rewards shows that it is one.

    Only a loss whose placement was not given, or given as "reward", is tried. If it was not given, the reward must not
    change the gradient: what a policy loss returns moves with the reward as well.
    """
    asked = loss.asked_placement
    if asked not in (None, "reward") or loss.spec is not None or not loss.takes & {*ROW_FIELDS, "rollout"}:
        return loss
    try:
        response = _response(loss, seed)
    except KltestError:  # a loss that fails is reported when it is measured
        return loss
    if response is None or not (response.detached or asked):
        return loss
    noted = copy.copy(loss)
    notes = [HINT] * response.upwards
    if response.unit == 1:
        noted.placement, noted.shaped, noted.unrewarded, notes = "reward", True, True, [RECOGNISED]
    elif response.unit == -1 and asked and not loss.takes_beta:
        noted.unrewarded, notes = True, [COST]
    noted.notes = [*loss.notes, *notes]
    return noted


def _response(loss: Loss, seed: int) -> _Response | None:
    """Call the loss with rewards of 0 and with others; None if it returns one number for the batch."""
    instance = instances(ENVIRONMENT, seed)[0]
    few = np.argsort(instance.paths.lengths)[:ROWS]
    rollout = Rollout.of(instance, padding=seed).take(few)
    rise = torch.linspace(LOWEST, HIGHEST, len(rollout)).double()
    sums, gradients = [], []
    for rewards in (torch.zeros_like(rise), rise):
        batch = with_rewards(rollout, rewards)
        with preserved(seed):
            result = loss.for_experiments().returned(batch)
        if result.returned == "scalar":
            return None
        each = reduce(result.loss.double(), batch.peek("mask"))
        found = leaf_gradients(loss, each.sum(), batch)
        gradients.append([found[leaf] if leaf in found else torch.zeros_like(batch.peek(leaf)) for leaf in LEAVES])
        sums.append(each.detach())
    detached = all(_equal(one, other, UNMOVED) for one, other in zip(*gradients, strict=True))
    live = rollout.peek("mask") != 0
    return _Response(rise, sums[1] - sums[0], live.sum(dim=1).double(), live.shape[1], detached)


def _equal(one: Tensor, other: Tensor, absolute: float) -> bool:
    return torch.allclose(one, other, rtol=SLOPE, atol=absolute)
