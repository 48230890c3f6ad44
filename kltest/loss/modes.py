"""Modes of torch under which a loss is called."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def eagerly() -> AbstractContextManager[None]:
    """Run compiled functions as they are written, if torch can do so: compiling tiny batches takes minutes."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


@contextmanager
def unusual_input() -> Iterator[None]:
    """Let a loss compute with NaN and infinity, and make NumPy arrays of what requires grad, without a complaint."""
    with np.errstate(all="ignore"), _AsArrays():
        yield


class _AsArrays(TorchFunctionMode):
    """Let any tensor become a NumPy array, without its gradient, as `float(tensor)` becomes a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy or func is Tensor.__array__:
            with torch._C.DisableTorchFunction():
                plain = args[0].detach()
                return func(plain.float() if plain.dtype == torch.bfloat16 else plain, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
