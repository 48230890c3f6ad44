"""The environments of the promises, with rollouts enumerated, and a loss with its fields built."""

import torch

from kltest.environments import Instance, ngram, ragged, sequence
from kltest.loss.calling import Loss
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.rollout import LEAVES, Rollout

FIXED = {"V=8, T=6": sequence(8, 6), "V=2, T=16": sequence(2, 16)}
OTHERS = {
    "ragged, V=8, T≤6": ragged(8, 6),
    "2-gram, V=8, T=6": ngram(8, 6, 2),
    "3-gram, V=2, T=16": ngram(2, 16, 3),
    "ragged 2-gram, V=8, T≤6": ngram(8, 6, 2, end_token=0),
}


def drawn(environment) -> Instance:
    """A random instance, its rollouts enumerated."""
    instance = Instance.draw(environment, 0)
    assert len(instance.paths) > 0
    return instance


def loss(name: str, *, declared: bool = True) -> Loss:
    """A registered estimator; not `declared`, it is measured as anybody's function would be."""
    found = resolve(name, Call())
    if not declared:
        found.spec = None
    return found


def built(instance: Instance, taken: Loss) -> Rollout:
    """All rollouts, with the fields that the loss takes."""
    rollout = Rollout.of(instance)
    for name in {*taken.takes, "mask"}:
        rollout.peek(name)
    return rollout


def forward_backward(taken: Loss, rollout: Rollout):
    """The loss's own work: one call, one backward pass."""
    leaves = [rollout.peek(name) for name in LEAVES if name in taken.takes]
    return torch.autograd.grad(taken(rollout).objective, leaves)
