"""The memory that a tensor lies in: what views of it share, and what tells it from others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch


def memory(tensor: Tensor) -> torch.UntypedStorage:
    """Its storage; inside torch.func.grad or torch.vmap, that of the tensor that is wrapped there."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()
