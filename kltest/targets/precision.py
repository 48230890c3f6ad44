"""In which floating-point precision a loss computed, whatever the type of what it returned."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def lowest_precision(*results: Tensor) -> str:
    """The least precise floating type among tensors and all that they were computed from, as autograd recorded it."""
    found = {result.dtype for result in results if result.dtype.is_floating_point}
    nodes = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        found |= {entry.dtype for entry in getattr(node, "_input_metadata", ()) if entry.dtype.is_floating_point}
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return str(min(found, key=lambda kind: _BITS.get(kind, 0), default=torch.float64)).removeprefix("torch.")
