"""One call of a loss and one backward pass: the gradient at every row's log-probs."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.moments.tolerances import close, near_rows
from kltest.rollout import LEAVES, Rollout


@dataclass(frozen=True)
class RowGradients:
    """∂objective/∂leaf for the leaves that the loss used, in the order of LEAVES: logp (B, T) and logits (B, T, V).

    Padded positions are zero: nothing that is written there depends on the policy.
    """

    by_leaf: dict[str, np.ndarray]
    outcome: Outcome

    @property
    def logp(self) -> np.ndarray | None:
        """(B, T) gradient at the log-probs, None if the loss does not use them."""
        return self.by_leaf.get("logp")

    @property
    def logits(self) -> np.ndarray | None:
        """(B, T, V) gradient at the logits, None if the loss does not use them."""
        return self.by_leaf.get("logits")

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the leaves that the loss used."""
        return frozenset(self.by_leaf)

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The gradients, a leaf each."""
        return tuple(self.by_leaf.values())

    @property
    def dtype(self) -> str:
        """The lowest precision in which the loss computes."""
        return self.outcome.dtype

    def close(self, own: tuple[np.ndarray, ...], part: tuple[np.ndarray, ...], factor: float = 1.0) -> bool:
        """True if two gradients agree at the precision of this call; it is found only if they do not in float64."""
        return close(own, part, "float64", factor) or (self.dtype != "float64" and close(own, part, self.dtype, factor))

    def close_rows(self, own: tuple[np.ndarray, ...], factor: float = 1.0) -> bool:
        """True if the gradient of each row, multiplied by `factor`, is that of `own`, leaf by leaf."""

        def all_near(dtype: str) -> bool:
            return all(near_rows(factor * part, mine, dtype) for mine, part in zip(own, self.parts, strict=True))

        return all_near("float64") or (self.dtype != "float64" and all_near(self.dtype))

    def row(self, index: int) -> tuple[np.ndarray, ...]:
        """The gradients of one row, leaf by leaf."""
        return tuple(part[index] for part in self.parts)


def differentiate(loss: Loss, rollout: Rollout, live: np.ndarray | None, factor: float = 1.0) -> RowGradients:
    """Gradients of `factor` times the objective of one call, from one backward pass.

    Args:
        loss: The loss; it is called once.
        rollout: The batch, B rollouts of up to T tokens, with fresh leaves.
        live: (B, T) bool, True on tokens; None if all positions are. The rollout's own mask does not serve, since a
            loss may write into it.
        factor: Multiplies the objective, as B does to undo a mean over rows.

    Raises:
        TargetError: The loss fails, torch cannot go backward, or the gradient of a live token is not finite.
    """
    outcome = loss(rollout)
    # The objective is scaled, not the gradient that backward starts from: a tensor given to start from makes torch
    # import its symbolic shapes, which takes a second.
    objective = outcome.objective * factor if outcome.objective.requires_grad else outcome.objective
    found = {
        name: _live_only(loss.name, rollout, name, gradient.numpy(), live)
        for name, gradient in leaf_gradients(loss, objective, rollout).items()
    }
    return RowGradients(found, outcome)


def leaf_gradients(loss: Loss, objective: Tensor, rollout: Rollout) -> dict[str, Tensor]:
    """∂objective/∂leaf at every position, for each leaf of a rollout that a loss's objective depends on."""
    leaves = {name: leaf for name in LEAVES if (leaf := rollout.built(name)) is not None}
    if not leaves or not objective.requires_grad:
        return {}
    found = backward(loss, objective, list(leaves.values()))
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}


def at_leaves(loss: Loss, objective: Tensor, rollout: Rollout) -> list[Tensor]:
    """∂objective/∂leaf at every position of every leaf; zeros for a leaf that the loss did not use."""
    found = leaf_gradients(loss, objective, rollout)
    return [found[name] if name in found else torch.zeros_like(rollout.peek(name)) for name in LEAVES]


def backward(loss: Loss, objective: Tensor, inputs: list[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of an objective at each input, None for an unused one; TargetError if torch cannot go backward."""
    began = time.monotonic()
    try:
        return torch.autograd.grad(objective, inputs, allow_unused=True)
    except RuntimeError as error:
        raise TargetError(
            f"torch cannot go backward through {loss.name}: {error}. Does it write into a tensor that the gradient "
            "still needs?"
        ) from error
    finally:
        loss.calls.backward += time.monotonic() - began


@dataclass(frozen=True)
class CallResult:
    """Outcome of a loss on one batch, gradients of the leaves that it used, and the positions of tokens (B, T)."""

    outcome: Outcome
    gradients: dict[str, Tensor]
    live: Tensor

    @property
    def value(self) -> Tensor:
        """The returned value: a scalar, (B,), or (B, T) with 0 at padded positions."""
        value = self.outcome.value
        if value is None:
            return self.outcome.objective.detach()
        return value.where(self.live, 0.0) if self.outcome.returned == "tokens" else value

    def at(self, positions: Tensor) -> dict[str, Tensor]:
        """Gradients at some positions (B, T) bool, by leaf."""
        return {name: gradient[positions] for name, gradient in self.gradients.items()}

    @property
    def row_sizes(self) -> Tensor:
        """(B,) largest absolute gradient at each row's live tokens, NaN if there is one."""
        sizes = [
            torch.where(self.live, gradient.reshape(*self.live.shape, -1).abs().amax(dim=2), 0.0).amax(dim=1)
            for gradient in self.gradients.values()
        ]
        return torch.stack(sizes).amax(dim=0) if sizes else torch.zeros(len(self.live), dtype=torch.float64)


class LossExperiment:
    """Calls of a loss on unusual input, for checks: results may be infinite, and grading does not hear of them."""

    def __init__(self, loss: Loss, floats: torch.dtype | None = None) -> None:
        self.loss = loss.for_experiments(floats)

    def call(self, rollout: Rollout) -> CallResult:
        """Call the loss and differentiate what it returned; TargetError if it raises."""
        live = rollout.peek("mask") != 0
        outcome = self.loss(rollout)
        return CallResult(outcome, leaf_gradients(self.loss, outcome.objective, rollout), live)


def live_positions(rollout: Rollout) -> np.ndarray | None:
    """(B, T) bool, True on live tokens; None if all are."""
    live = rollout.peek("mask").numpy() != 0
    return None if live.all() else live


def _live_only(name: str, rollout: Rollout, leaf: str, gradient: np.ndarray, live: np.ndarray | None) -> np.ndarray:
    if live is not None:
        gradient = np.where(live if gradient.ndim == 2 else live[..., None], gradient, 0.0)
    # The sum is finite if all entries are, nearly always: much faster than to look at each.
    if not np.isfinite(gradient.sum()) and not (finite := np.isfinite(gradient)).all():
        row, step = np.argwhere(~finite)[0][:2]
        tokens = rollout.peek("tokens")[row]
        tokens = tokens if live is None else tokens[live[row]]
        raise TargetError(
            f"the gradient of {name} with respect to {leaf} is not finite at token {step} of the rollout with "
            f"tokens {tokens.tolist()}, although every input is finite: look for a square root, a logarithm or a "
            "division whose derivative has no value there"
        )
    return gradient


def received(experiment: LossExperiment, rollout: Rollout, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradient of one call at constant fields that are made trainable, for those that receive one."""
    constants = {name: rollout.peek(name).detach().clone().requires_grad_() for name in names}
    with warnings.catch_warnings():
        # torch warns if a number is read from a tensor that requires grad; the caller's tensor does not.
        warnings.simplefilter("ignore", UserWarning)
        objective = experiment.loss(rollout.replace(**constants)).objective
    if not objective.requires_grad:
        return {}
    found = backward(experiment.loss, objective, list(constants.values()))
    return {name: part for name, part in zip(constants, found, strict=True) if part is not None}
