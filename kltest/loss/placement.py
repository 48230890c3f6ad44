"""Reduction of a loss to one number a rollout, its placement in loss or reward, and credit.

A *value* in the reward becomes a score-function loss. The costs c_s of the tokens are constants; the gradient at the
log-prob of token t is the cost that is charged to it,

    return: Σ_s c_s      to-go: Σ_{s ≥ t} c_s      immediate: c_t.

No importance ratio is added. Only live tokens count: nothing at padded positions, NaN included, has an effect.
"""

import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.estimators.spec import Credit, Place
from kltest.rollout import Rollout

ROW_FIELDS = frozenset({"reward", "advantage"})
"""Fields of one number a rollout, which many trainers repeat for every token."""


def with_rewards(rollout: Rollout, rewards: Tensor) -> Rollout:
    """Return the same batch, with fresh leaves, in which these are rewards and advantages."""
    other = rollout.replace(**dict.fromkeys(ROW_FIELDS, rewards))
    other.accessed = rollout.accessed
    return other


def place(value: Tensor, logp: Tensor, mask: Tensor, placement: Place = "loss", credit: Credit = "return") -> Tensor:
    """Return the losses (B,) of the rollouts, whose mean is to be differentiated; a scalar stays a scalar.

    Args:
        value: (B, T), (B,) or, if the placement is "loss", a scalar.
        logp: (B, T) log-probs of the sampled tokens.
        mask: (B, T), not 0 on live tokens.
        placement: "loss" reduces the value, "reward" detaches it and charges it to the tokens, "both" adds the two.
        credit: the tokens to which a reward is charged.

    Raises:
        TargetError: the value has another shape, or is a scalar in the reward.
    """
    _check(value, mask, placement)
    if placement == "loss":
        return reduce(value, mask)
    charged = charge(value, logp, mask, credit)
    return charged if placement == "reward" else reduce(value, mask) + charged


def reduce(value: Tensor, mask: Tensor) -> Tensor:
    """Sum (B, T) over live tokens to (B,); leave (B,) and scalars as they are."""
    return torch.where(mask != 0, value, 0.0).sum(dim=1) if value.dim() == 2 else value


def charge(value: Tensor, logp: Tensor, mask: Tensor, credit: Credit) -> Tensor:
    """Return (B,) Σ_t logp_t·sg(cost charged to t); a (B,) value is a cost of the last live token."""
    live = mask != 0
    score = torch.where(live, logp, 0.0)
    cost = torch.where(live, value.detach(), 0.0) if value.dim() == 2 else _paid_last(value.detach(), live)
    if credit == "return":
        return score.sum(dim=1) * cost.sum(dim=1)
    if credit == "to-go":
        cost = cost.flip(1).cumsum(dim=1).flip(1)
    return (score * cost).sum(dim=1)


def _paid_last(value: Tensor, live: Tensor) -> Tensor:
    """Return (B, T) with the (B,) value at each row's last live token; zeros in a row without any."""
    live_from_here = live.flip(1).cumsum(dim=1).flip(1)
    return torch.where(live & (live_from_here == 1), value[:, None], 0.0)


def _check(value: Tensor, mask: Tensor, placement: Place) -> None:
    rows, tokens = mask.shape
    if value.dim() == 0 and placement != "loss":
        raise TargetError(
            f"a scalar cannot be placed in the reward (placement {placement!r}): return one value per token, "
            "(B, T), or per rollout, (B,)"
        )
    if value.shape not in ((), (rows,), (rows, tokens)):
        raise TargetError(
            f"the loss returned shape {tuple(value.shape)} for a batch of B = {rows} rollouts of T = {tokens} tokens; "
            "it must be a scalar, (B,) or (B, T)"
        )
