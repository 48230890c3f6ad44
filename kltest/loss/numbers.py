"""Losses that take coefficients out of torch as NumPy numbers, called on input that only experiments have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What torch says of a tensor that it does not hand to NumPy: it requires grad, or NumPy has no such type.
_REFUSED = ("call numpy() on tensor that requires grad", "unsupported scalartype")
_NARROW = frozenset({torch.bfloat16})


def refused(error: BaseException) -> bool:
    """Whether a call failed because a tensor could not become an array."""
    return any(words in str(error).lower() for words in _REFUSED)


class AsNumbers(TorchFunctionMode):
    """Inside, any tensor becomes an array, as `float(tensor)` becomes a number: cut off from the gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy or func is Tensor.__array__:
            with torch._C.DisableTorchFunction():
                plain = args[0].detach()
                return func(plain.float() if plain.dtype in _NARROW else plain, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
