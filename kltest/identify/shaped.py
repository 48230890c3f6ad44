"""Recognition of shaped rewards: functions that return a reward less a penalty, higher being better."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.placement import ROW_FIELDS, reduce, with_rewards
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import LEAVES, Rollout

# Lengths differ there, so that a reward written to one token and one written to every token are told apart.
ENVIRONMENT = "ragged"
# Groups of two, three, four and six divide this number of rollouts.
ROWS = 12
# Rewards of the changed batch, all different: positive and below one, as many functions clip rewards to [-1, 1].
LOWEST, HIGHEST = 0.25, 0.75
# Largest error of a slope, for functions that compute in float32; and of a gradient that rewards do not change.
SLOPE, SAME = 1e-4, 1e-6
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
        signs = (sign for sign in (1, -1) for times in written if _same(self.moved, sign * times * self.rise, 0.0))
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
    detached = all(_same(one, other, SAME) for one, other in zip(*gradients, strict=True))
    live = rollout.peek("mask") != 0
    return _Response(rise, sums[1] - sums[0], live.sum(dim=1).double(), live.shape[1], detached)


def _same(one: Tensor, other: Tensor, absolute: float) -> bool:
    return torch.allclose(one, other, rtol=SLOPE, atol=absolute)
