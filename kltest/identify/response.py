"""Response of what a loss returns to rewards, and the sentences of a report on how a loss was read."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Largest error of a slope, for functions that compute in float32.
SLOPE = 1e-4
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
OWN = (
    "{name} is no coefficient of a KL term, since the gradient is not affine in it (tried at 0, ½, 1 and 2) or moves "
    "with the reference at 0: it was left at {value:g}"
)
UNREWARDED = (
    "It reads rewards and takes no coefficient: its KL part is the gradient with rewards and advantages of zero, which "
    "is what was graded"
)
REST = "What it returns without its KL term does not move with the log-probs: that was subtracted"


@dataclass(frozen=True)
class Response:
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
        signs = (sign for sign in (1, -1) for times in written if equal(self.moved, sign * times * self.rise, 0.0))
        return next(signs, 0)

    @property
    def upwards(self) -> bool:
        """True if the sums rise where rewards rise, centred or scaled perhaps."""
        return float((self.moved * self.rise).sum()) > SLOPE


def equal(one: Tensor, other: Tensor, absolute: float) -> bool:
    """Return True if two tensors agree up to rounding in float32."""
    return torch.allclose(one, other, rtol=SLOPE, atol=absolute)
