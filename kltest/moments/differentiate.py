"""One call of a loss and one backward pass: the gradient at every row's log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.loss.outcome import Loss, Outcome
from kltest.rollout import LEAVES, Rollout


@dataclass(frozen=True)
class RowGradients:
    """∂objective/∂logp (B, T) and ∂objective/∂logits (B, T, V), None where the loss did not use that field.

    Padded positions are zero: nothing that is written there depends on the policy.
    """

    logp: np.ndarray | None
    logits: np.ndarray | None
    outcome: Outcome

    @property
    def leaves(self) -> frozenset[str]:
        return frozenset(name for name in LEAVES if getattr(self, name) is not None)

    @property
    def dtype(self) -> str:
        """The lowest precision in which the loss computes."""
        return self.outcome.dtype

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """What reached the batch, leaf by leaf."""
        return tuple(part for part in (self.logp, self.logits) if part is not None)

    def row(self, index: int) -> tuple[np.ndarray, ...]:
        """What reached one row, leaf by leaf."""
        return tuple(part[index] for part in self.parts)


def differentiate(loss: Loss, rollout: Rollout, live: np.ndarray | None, factor: float = 1.0) -> RowGradients:
    """Call a loss on a batch and go backward once, from `factor` times the objective.

    `live` (B, T) bool says where tokens are, None that they are everywhere; the rollout's own mask may be written into.
    Raises TargetError if the gradient of a live token is not finite.
    """
    outcome = loss(rollout)
    leaves = {name: leaf for name in LEAVES if (leaf := rollout.built(name)) is not None}
    found: dict[str, np.ndarray] = {}
    if leaves and outcome.objective.requires_grad:
        # Scaled here, since a gradient given to start from makes torch import its symbolic shapes, for a second.
        gradients = backward(loss, outcome.objective * factor, list(leaves.values()))
        found = {
            name: _live_only(loss, rollout, name, gradient.numpy(), live)
            for name, gradient in zip(leaves, gradients, strict=True)
            if gradient is not None
        }
    return RowGradients(found.get("logp"), found.get("logits"), outcome)


def backward(loss: Loss, objective: Tensor, inputs: list[Tensor]) -> Sequence[Tensor | None]:
    """The gradient at each input, None where none arrives; TargetError where torch cannot go backward."""
    try:
        return torch.autograd.grad(objective, inputs, allow_unused=True)
    except RuntimeError as error:
        raise TargetError(
            f"torch cannot go backward through {loss.name}: {error}. Does it write into a tensor that the gradient "
            "still needs?"
        ) from error


def live_positions(rollout: Rollout) -> np.ndarray | None:
    """(B, T) bool, True on live tokens; None where all are."""
    live = rollout.peek("mask").numpy() != 0
    return None if live.all() else live


def _live_only(loss: Loss, rollout: Rollout, name: str, gradient: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    if live is not None:
        gradient = np.where(live if gradient.ndim == 2 else live[..., None], gradient, 0.0)
    if not np.isfinite(gradient.sum()) and not (finite := np.isfinite(gradient)).all():
        row, step = np.argwhere(~finite)[0][:2]
        tokens = (
            rollout.peek("tokens")[row].tolist() if live is None else rollout.peek("tokens")[row][live[row]].tolist()
        )
        raise TargetError(
            f"the gradient of {loss.name} with respect to {name} is not finite at token {step} of the rollout with "
            f"tokens {tokens}, although every input is finite: look for a square root, a logarithm or a division "
            "whose derivative has no value there"
        )
    return gradient
