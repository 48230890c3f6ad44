"""Exact moments against one backward pass per rollout, as one would write it, and against torch.func.vmap(grad)."""

import numpy as np
import torch

from benchmarks.environments import FIXED, drawn, loss
from benchmarks.measure import Row, compare
from kltest.environments import Instance
from kltest.moments import exact

SAMPLE = 200


def main() -> list[Row]:
    rows = []
    for case, environment in FIXED.items():
        instance = drawn(environment)
        for name, declared in (("k3-loss", True), ("k3-loss as a stranger’s function", False)):
            taken = loss("k3-loss", declared=declared)
            for claim, theirs, bound in (
                ("one backward pass per rollout / exact moments", one_at_a_time, 1000.0),
                ("vmap(grad) / exact moments", vectorised, None),
            ):
                rows.append(
                    compare(
                        claim,
                        f"{case}: {name}",
                        lambda taken=taken, instance=instance: exact(taken, instance),
                        lambda theirs=theirs, instance=instance: theirs(instance),
                        bound=bound,
                        at_most=False,
                        rounds=3,
                        scale=len(instance.paths) / SAMPLE,
                    )
                )
    return rows


def _rollouts(instance: Instance) -> tuple[torch.Tensor, ...]:
    paths = instance.paths.take(np.linspace(0, len(instance.paths) - 1, SAMPLE).astype(int))
    tables = (torch.from_numpy(table) for table in (instance.policy, instance.reference))
    return (*tables, torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens))


def one_at_a_time(instance: Instance) -> torch.Tensor:
    """Table, log-softmax, gather, loss, backward: SAMPLE rollouts of it."""
    table, reference, contexts, tokens = _rollouts(instance)
    total, squares = torch.zeros_like(table), 0.0
    for context, token in zip(contexts, tokens, strict=True):
        logits = table.clone().requires_grad_()
        logp = logits.log_softmax(dim=1)[context, token]
        u = logp - reference[context, token]
        ((-u).exp() - 1 + u).sum().backward()
        total += logits.grad
        squares += float(logits.grad.square().sum())
    return total


def vectorised(instance: Instance, chunk: int = 50) -> torch.Tensor:
    """The same with vmap(grad), as many at a time as fit into memory."""
    table, reference, contexts, tokens = _rollouts(instance)

    def single(logits: torch.Tensor, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        u = logits.log_softmax(dim=1)[context, token] - reference[context, token]
        return ((-u).exp() - 1 + u).sum()

    each = torch.func.vmap(torch.func.grad(single), in_dims=(None, 0, 0))
    total, squares = torch.zeros_like(table), 0.0
    for first in range(0, SAMPLE, chunk):
        gradients = each(table, contexts[first : first + chunk], tokens[first : first + chunk])
        total += gradients.sum(dim=0)
        squares += float(gradients.square().sum())
    return total
