"""The same batch again and again: values and gradients that do not repeat."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from kltest.checks.call_once import Seen, look, usual_batch
from kltest.checks.check import Found
from kltest.errors import KltestError
from kltest.identify.findings import Findings

# A coefficient that is adapted every tenth call, or so, shows as well.
CALLS = 16
# The order in which torch adds up may depend on how memory lies; nothing else may differ.
SAME = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-2, "bfloat16": 1e-1}


def differs(findings: Findings) -> Found | None:
    """Whether one batch gives different values or gradients; the random state goes on from call to call."""
    loss = findings.loss.for_experiments()
    batch = usual_batch(findings)
    with torch.random.fork_rng(devices=[]):
        first = look(loss, batch.replace())
        for call in range(2, CALLS + 1):
            if words := _difference(first, look(loss, batch.replace())):
                return Found(f"The same batch of {len(batch)} rollouts gives {words} in call {call}.")
    if noticed := findings.observed.nondeterministic:
        return Found(f"{noticed}.")
    return None


def why_not(findings: Findings) -> str | None:
    """Why one call says nothing beside another: no gradient reaches the policy, or the same batch gives two."""
    if findings.blocked:
        return "no gradient reaches the policy at all (KL509)"
    with suppress(KltestError):
        if findings.once(differs):
            return "calls cannot be compared with one another, since they do not repeat (KL507)"
    return None


def _difference(first: Seen, again: Seen) -> str | None:
    dtype = first.outcome.dtype
    one, other = (float(seen.value.sum()) for seen in (first, again))
    if not _same(first.value, again.value, dtype):
        return f"values that sum to {one:.6g} in the first call and to {other:.6g}"
    if first.gradients.keys() != again.gradients.keys():
        return "a gradient with respect to other inputs"
    for name, gradient in first.gradients.items():
        found = again.gradients[name]
        if not _same(gradient, found, dtype):
            place = int((gradient - found).abs().argmax())
            one, other = (float(part.flatten()[place]) for part in (gradient, found))
            return f"the gradient {one:.6g} at an entry of {name} in the first call and {other:.6g}"
    return None


def _same(one: Tensor, other: Tensor, dtype: str) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(one.abs().max())
    return bool((one - other).abs().max() <= SAME[dtype] * scale)
