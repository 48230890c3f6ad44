"""Recognition of a shaped reward, a reward less a penalty, by how what a loss returns responds to rewards."""

import copy

import numpy as np
import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.placement import ROW_FIELDS, reduce, with_rewards
from kltest.moments.differentiate import at_leaves
from kltest.rollout import Rollout

# Lengths differ there, so that masks matter.
ENVIRONMENT = "ragged"
# Groups of two, three, four and six divide this number of rollouts.
ROWS = 12
# Rewards of the changed batch, all different: positive and below one, as many functions clip rewards to [-1, 1].
LOWEST, HIGHEST = 0.25, 0.75
# Largest error of a slope, for functions that compute in float32, and largest change of a gradient that rewards leave.
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


def rewarded(loss: Loss) -> bool:
    """Return True if a loss reads rewards, or may read them."""
    return bool(loss.takes & {*ROW_FIELDS, "rollout"})


def as_shaped_reward(loss: Loss, seed: int) -> Loss:
    """Return the loss, as one of placement shaped-reward if a change of the rewards shows that it is one.

    Only a loss whose placement was not given, or given as "reward", is tried. If it was not given, the reward must not
    change the gradient: what a policy loss returns moves with the reward as well.
    """
    asked, noted = loss.asked_placement, copy.copy(loss)
    if asked not in (None, "reward") or not rewarded(loss):
        return loss
    try:
        unit, upwards, detached = _response(loss, seed)
    except KltestError:  # a loss that fails is reported when it is measured
        return loss
    if unit is None or not (detached or asked):
        return loss
    notes = [HINT] * upwards
    if unit == 1:
        noted.placement, noted.shaped, noted.unrewarded, noted.less, notes = "reward", True, True, "", [RECOGNISED]
    elif unit == -1 and asked and not loss.takes_beta:
        noted.unrewarded, notes = True, [COST]
    noted.notes = [*loss.notes, *notes]
    return noted


def _response(loss: Loss, seed: int) -> tuple[int | None, bool, bool]:
    """Call the loss with rewards of 0 and with others; its sum over live tokens, a row each, is what may move.

    Returns:
        1 if each sum rises by as much as its reward, written to one token, to live ones or to all, −1 if it falls, 0 if
        it does neither, None if the loss returns one number for the batch; True if sums rise where rewards do, centred
        or scaled perhaps; True if no gradient changes with the rewards.
    """
    instance = instances(ENVIRONMENT, seed)[0]
    rollout = Rollout.of(instance, padding=seed).take(np.argsort(instance.paths.lengths)[:ROWS])
    live = rollout.peek("mask") != 0
    rise = torch.linspace(LOWEST, HIGHEST, len(rollout)).double()
    sums, gradients = [], []
    for rewards in (torch.zeros_like(rise), rise):
        batch = with_rewards(rollout, rewards)
        with preserved(seed):
            result = loss.for_experiments().returned(batch)
        if result.returned == "scalar":
            return None, False, False
        each = reduce(result.loss.double(), batch.peek("mask"))
        gradients.append(at_leaves(loss, each.sum(), batch))
        sums.append(each.detach())
    moved = sums[1] - sums[0]
    written = [sign * times * rise for sign in (1, -1) for times in (1.0, live.sum(dim=1).double(), live.shape[1])]
    unit = next((1 if place < 3 else -1 for place, all_of in enumerate(written) if _equal(moved, all_of, 0.0)), 0)
    detached = all(_equal(one, other, UNMOVED) for one, other in zip(*gradients, strict=True))
    return unit, float((moved * rise).sum()) > SLOPE, detached


def _equal(one: Tensor, other: Tensor, absolute: float) -> bool:
    return torch.allclose(one, other, rtol=SLOPE, atol=absolute)
