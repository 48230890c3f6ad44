"""From what a loss returns to one number a rollout: reduction, placement in loss or reward, and credit.

A *value* in the reward becomes a score-function loss: with the cost c_s of token s held constant, its gradient on the
log-prob of token t is the cost that token is held to account for,

    return: Σ_s c_s      to-go: Σ_{s ≥ t} c_s      immediate: c_t.

No importance ratio is added. Only live tokens count; whatever stands at padded positions, NaN included, stays there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.estimators.spec import Credit, Placement


def place(
    value: Tensor, logp: Tensor, mask: Tensor, placement: Placement = "loss", credit: Credit = "return"
) -> Tensor:
    """Per-rollout losses (B,) whose mean is to be differentiated; a scalar loss stays the scalar it is.

    `value` is (B, T), (B,) or, as a loss only, a scalar; `logp` and `mask` are (B, T). "loss" reduces the value,
    "reward" detaches it and charges it to the tokens by `credit`, "both" is the sum of the two.
    Raises TargetError for any other shape, and for a scalar in the reward.
    """
    _check(value, mask, placement)
    if placement == "loss":
        return reduce(value, mask)
    charged = charge(value, logp, mask, credit)
    return charged if placement == "reward" else reduce(value, mask) + charged


def reduce(value: Tensor, mask: Tensor) -> Tensor:
    """(B, T) summed over live tokens to (B,); (B,) and scalars as they are."""
    return torch.where(mask != 0, value, 0.0).sum(dim=1) if value.dim() == 2 else value


def charge(value: Tensor, logp: Tensor, mask: Tensor, credit: Credit) -> Tensor:
    """(B,) score-function losses Σ_t logp_t·sg(cost charged to t); a (B,) value is paid at the last live token."""
    live = mask != 0
    score = torch.where(live, logp, 0.0)
    cost = torch.where(live, value.detach(), 0.0) if value.dim() == 2 else _paid_last(value.detach(), live)
    if credit == "return":
        return score.sum(dim=1) * cost.sum(dim=1)
    if credit == "to-go":
        cost = cost.flip(1).cumsum(dim=1).flip(1)
    return (score * cost).sum(dim=1)


def _paid_last(value: Tensor, live: Tensor) -> Tensor:
    """(B, T) with the (B,) value at each row's last live token; nothing in a row without any."""
    live_from_here = live.flip(1).cumsum(dim=1).flip(1)
    return torch.where(live & (live_from_here == 1), value[:, None], 0.0)


def _check(value: Tensor, mask: Tensor, placement: Placement) -> None:
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
