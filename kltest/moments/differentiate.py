"""One call of a loss and one backward pass: the gradient at every row's log-probs."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.moments.tolerances import close, near_rows
from kltest.rollout import LEAVES, Rollout

# Words of the errors of what can only be differentiated by `backward()`, to all leaves at once.
WANTS_BACKWARD = (".backward()", "`inputs`")


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
        return gradients_at(objective, inputs)
    except RuntimeError as error:
        raise TargetError(
            f"torch cannot go backward through {loss.name}: {str(error).partition(chr(10))[0]}. Does it write into a "
            "tensor that the gradient still needs?"
        ) from error
    finally:
        loss.calls.backward += time.monotonic() - began


def gradients_at(objective: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of an objective at each input, None for an unused one; the graph is retained.

    A checkpoint with `use_reentrant=True`, and what else refuses to go backward to some tensors only, is differentiated
    by `backward()`. That adds up at every leaf of the graph, so that each gets back what it held.
    """
    try:
        return torch.autograd.grad(objective, inputs, allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        if not any(words in str(error) for words in WANTS_BACKWARD):
            raise
    leaves = [*inputs, *(one for one in _leaves(objective.grad_fn) if all(one is not given for given in inputs))]
    before = [one.grad for one in leaves]
    for one in leaves:
        one.grad = None
    try:
        objective.backward(retain_graph=True)
        return [one.grad for one in inputs]
    finally:
        for one, held in zip(leaves, before, strict=True):
            one.grad = held


def _leaves(node: Any) -> list[Tensor]:
    """The leaves that a graph adds gradients to, as far as it shows them."""
    seen, waiting, found = set[Any](), [node], list[Tensor]()
    while waiting:
        if (one := waiting.pop()) is None or one in seen:
            continue
        seen.add(one)
        found += [one.variable] if hasattr(one, "variable") else []
        waiting += [following for following, _ in one.next_functions]
    return found


@dataclass(frozen=True)
class CallResult:
    """Outcome of a loss on one batch, gradients of the leaves that it used, and the positions of tokens (B, T).

    `comparable`: the value is a matter of the batch, and not of the call.
    """

    outcome: Outcome
    gradients: dict[str, Tensor]
    live: Tensor
    comparable: bool = True

    @property
    def value(self) -> Tensor:
        """The returned value: a scalar, (B,), or (B, T) with 0 at padded positions; 0 if it is not `comparable`."""
        if not self.comparable:
            return torch.zeros((), dtype=torch.float64)
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
    """Calls of a loss on unusual input, for checks: results may be infinite, and grading does not hear of them.

    Of a loss whose value differs from call to call, which is not `comparable`, gradients are left to look at.
    """

    def __init__(self, loss: Loss, floats: torch.dtype | None = None, *, comparable: bool = True) -> None:
        self.loss, self.comparable = loss.for_experiments(floats), comparable

    def call(self, rollout: Rollout) -> CallResult:
        """Call the loss and differentiate what it returned; TargetError if it raises."""
        live = rollout.peek("mask") != 0
        outcome = self.loss(rollout)
        return CallResult(outcome, leaf_gradients(self.loss, outcome.objective, rollout), live, self.comparable)


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
