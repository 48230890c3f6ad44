"""Exact gradient and variance over all rollouts, against what else one could do with the same rows.

That is the loss's own forward and backward; one backward pass per rollout, as one would write it; and vmap(grad).
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import torch

from benchmarks.environments import built, forward_backward, least, loss
from benchmarks.measure import Row, compare, memory, peak
from kltest.environments import Instance, ngram, ragged, sequence
from kltest.moments import exact

CLAIM = "exact moments / the loss's own forward and backward"
BOUNDS = {"fixed length": 1.5, "ragged or shared contexts": 3.0}
ENVIRONMENTS = {
    "V=8, T=6": sequence(8, 6),
    "V=2, T=16": sequence(2, 16),
    "ragged, V=8, T≤6": ragged(8, 6),
    "2-gram, V=8, T=6": ngram(8, 6, 2),
    "3-gram, V=2, T=16": ngram(2, 16, 3),
    "ragged 2-gram, V=8, T≤6": ngram(8, 6, 2, end_token=0),
}
# Estimators, and whether they declare that they work token by token. What a stranger's function does is seen from its
# calls: the first two work token by token, the last one reads whole rollouts.
STRANGER = "as a stranger’s function"
LOSSES = {
    "k3-loss": ("k3-loss", True),
    f"k3-loss {STRANGER}": ("k3-loss", False),
    "k2-loss": ("k2-loss", True),
    f"k2-loss {STRANGER}": ("k2-loss", False),
    f"length-normalised {STRANGER} of whole rollouts": ("length-normalised", False),
}
# Rollouts that stand for all of them where each takes a pass of its own.
SAMPLE = 200


def main() -> list[Row]:
    """Return the rows of the table of ratios."""
    rows = []
    for (case, environment), (label, (name, declared)) in product(ENVIRONMENTS.items(), LOSSES.items()):
        kind = "fixed length" if case.startswith("V=") else "ragged or shared contexts"
        instance, taken = Instance.draw(environment, 0), loss(name, declared=declared)
        words, whole = f"{case}: {label}", name == "length-normalised"
        ours, rollout = partial(exact, taken, instance), built(instance, taken)
        # What works token by token is called on contexts and tokens alone, and need not be called so often.
        weights = torch.from_numpy(instance.rollout_weights("current"))
        floor = partial(least, taken, rollout, weights) if whole else None
        theirs = partial(forward_backward, taken, rollout)
        rows.append(compare(f"{CLAIM}, {kind}", words, ours, theirs, bound=BOUNDS[kind], floor=floor, rounds=7))
        if kind == "fixed length" and name != "k2-loss":
            for claim, single, bound in SINGLE:
                scale = len(instance.paths) / SAMPLE
                options = {"bound": bound, "at_most": False, "rounds": 3, "scale": scale}
                rows.append(compare(claim, words, ours, partial(single, instance), **options))
            claim = "peak memory of exact moments / fields of the loss"
            rows.append(memory(claim, words, peak_memory, case, label, bound=6.0))
    return rows


def peak_memory(case: str, label: str) -> Iterator[tuple[int, int]]:
    """Peak growth of the process, and bytes of logp, ref_logp and mask."""
    name, declared = LOSSES[label]
    instance, taken = Instance.draw(ENVIRONMENTS[case], 0), loss(name, declared=declared)
    rows, steps = instance.paths.shape
    yield peak(lambda: exact(taken, instance)), 3 * 8 * rows * steps


def _rollouts(instance: Instance) -> tuple[torch.Tensor, ...]:
    paths = instance.paths.take(np.linspace(0, len(instance.paths) - 1, SAMPLE).astype(int))
    return tuple(map(torch.from_numpy, (instance.policy, instance.reference, paths.contexts, paths.tokens)))


def k3(logits: torch.Tensor, reference: torch.Tensor, context: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Table, log-softmax, gather, loss: of one rollout."""
    u = logits.log_softmax(dim=1)[context, token] - reference[context, token]
    return ((-u).exp() - 1 + u).sum()


def one_at_a_time(instance: Instance) -> None:
    """SAMPLE backward passes."""
    table, reference, contexts, tokens = _rollouts(instance)
    total, squares = torch.zeros_like(table), 0.0
    for context, token in zip(contexts, tokens, strict=True):
        logits = table.clone().requires_grad_()
        k3(logits, reference, context, token).backward()
        total += logits.grad
        squares += float(logits.grad.square().sum())


def vectorised(instance: Instance, chunk: int = 50) -> None:
    """The same with vmap(grad), as many at a time as fit into memory."""
    table, reference, contexts, tokens = _rollouts(instance)
    each = torch.func.vmap(torch.func.grad(k3), in_dims=(None, None, 0, 0))
    total, squares = torch.zeros_like(table), 0.0
    for rows in zip(contexts.split(chunk), tokens.split(chunk), strict=True):
        gradients = each(table, reference, *rows)
        total += gradients.sum(dim=0)
        squares += float(gradients.square().sum())


SINGLE = (
    ("one backward pass per rollout / exact moments", one_at_a_time, 1000.0),
    ("vmap(grad) / exact moments", vectorised, None),
)
