"""Modes of torch under which a loss is called."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

_BY_INDEX = frozenset(
    {Tensor.__getitem__, Tensor.__setitem__, Tensor.index_select, torch.index_select, Tensor.take, torch.take}
)
# What torch says of a tensor that cannot become a NumPy array: it requires grad, or NumPy has no such type.
_NO_ARRAY = ("call numpy() on tensor that requires grad", "unsupported scalartype")


def memory(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; inside torch.func.grad or torch.vmap, that of the tensor wrapped there."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def eagerly() -> AbstractContextManager[None]:
    """Run compiled functions as they are written, if torch can do so: compiling tiny batches takes minutes."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def no_index_by(mask: Tensor | None) -> AbstractContextManager[object]:
    """Make indexing by an integer mask, or a part of it, raise: it would gather 0 and 1 where a boolean one selects."""
    return nullcontext() if mask is None or mask.dtype != torch.int64 else _NoIndex(mask)


class _NoIndex(TorchFunctionMode):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self._memory = memory(mask)._cdata

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BY_INDEX:
            index = (args[1:2] if func is Tensor.__setitem__ else args[1:], kwargs.get("index"))
            for item in tree_iter(index):
                if isinstance(item, Tensor) and memory(item)._cdata == self._memory:
                    raise IndexError("the integer mask is used as an index")
        return func(*args, **kwargs)


def needs_arrays(error: BaseException) -> bool:
    """Return True if a call failed because a tensor could not become an array."""
    return any(words in str(error).lower() for words in _NO_ARRAY)


class AsArrays(TorchFunctionMode):
    """Let any tensor become a NumPy array, without its gradient, as `float(tensor)` becomes a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy or func is Tensor.__array__:
            with torch._C.DisableTorchFunction():
                plain = args[0].detach()
                return func(plain.float() if plain.dtype == torch.bfloat16 else plain, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
