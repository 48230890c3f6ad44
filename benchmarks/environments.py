"""Code that scripts share: environments with their rollouts, a loss with its fields built, the loss's own work."""

import torch

from kltest.environments import Instance
from kltest.environments.paths import Paths
from kltest.loss.calling import Loss
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments.enumeration import CHUNK
from kltest.rollout import LEAVES, Rollout


def loss(name: str, *, declared: bool = True) -> Loss:
    """A registered estimator; not `declared`, it is measured as anybody's function would be."""
    found = resolve(name, Call())
    return found if declared else found.changed(spec=None)


def built(instance: Instance, taken: Loss, paths: Paths | None = None) -> Rollout:
    """All rollouts, or those of `paths`, with the fields that the loss takes."""
    rollout = Rollout.of(instance, paths)
    for name in {*taken.takes, "mask"}:
        rollout.peek(name)
    return rollout


def forward_backward(taken: Loss, rollout: Rollout):
    """The loss's own work: one call, one backward pass."""
    leaves = [rollout.peek(name) for name in LEAVES if name in taken.takes]
    return torch.autograd.grad(taken(rollout).objective, leaves)


def least(taken: Loss, rollout: Rollout, weights: torch.Tensor) -> None:
    """Work that exact moments of any function cannot leave out, whatever the environment.

    Each field of the loss is written once, the loss is called and differentiated, in parts that stay in the processor's
    cache, and the gradient and its square are weighted and added up over the rows.
    """
    size = CHUNK // rollout.peek("mask").shape[1]
    fields = {name: rollout.peek(name).detach() for name in {*taken.takes, "mask"}}
    for first in range(0, len(weights), size):
        part = Rollout({name: field[first : first + size].clone() for name, field in fields.items()})
        for gradient in forward_backward(taken, part):
            weights[first : first + size] @ gradient
            weights[first : first + size] @ gradient.square()
