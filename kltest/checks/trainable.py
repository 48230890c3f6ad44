"""Gradients that constants of a rollout, as the reference's log-probs, would receive if they could be trained."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.loss.resolve import Variant
from kltest.moments.differentiate import LossExperiment, backward
from kltest.rollout import Rollout


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


def with_gradient(loss: Loss, added: Callable[[Rollout], Mapping[str, Tensor]]) -> Variant:
    """Return a loss whose policy gets a further gradient at its leaves."""

    def call(rollout: Rollout) -> Outcome:
        outcome = loss(rollout)
        extra = [(rollout.peek(name) * part).sum() for name, part in added(rollout).items()]
        return replace(outcome, objective=outcome.objective + sum(extra), rows=None, returned="scalar")

    return Variant(loss, call)
