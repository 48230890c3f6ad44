"""State of the process that a loss may change (random generators, torch's settings), and modes that it is called in."""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from kltest.loss.state import NUMPY, PYTHON, TORCH, State


@contextmanager
def preserved(seed: int | None = None) -> Iterator[None]:
    """Preserve the global state: whatever runs inside leaves random generators and torch's settings as they were.

    Inside, gradients are on and tensors are made on the CPU.

    Args:
        seed: the generators of torch, NumPy and Python begin there; None leaves them as they are.
    """
    before = State((TORCH, PYTHON, NUMPY))
    with ExitStack() as stack:
        # `torch.device` slows every call of torch down, and nearly nobody needs it.
        if not _on_cpu():
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(settings_preserved())
        if seed is not None:
            # torch.manual_seed takes eight milliseconds where no GPU is in use yet: it keeps a stack trace for it.
            (torch if torch.cuda.is_initialized() else torch.default_generator).manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
        try:
            yield
        finally:
            before.reset()


@contextmanager
def settings_preserved() -> Iterator[None]:
    """Preserve torch's settings alone, around each call of a loss: its random numbers go on from call to call."""
    gradients, dtype, on_cpu = torch.is_grad_enabled(), torch.get_default_dtype(), _on_cpu()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if on_cpu and not _on_cpu():
            torch.set_default_device(None)


@contextmanager
def repeatable_generators() -> Iterator[None]:
    """Seed `np.random.default_rng()` from NumPy's global generator, which is held and restored, not from the system."""
    make = np.random.default_rng

    def seeded(seed: Any = None) -> np.random.Generator:
        return make(np.random.randint(2**31) if seed is None else seed)  # noqa: NPY002

    np.random.default_rng = seeded  # type: ignore[assignment]
    try:
        yield
    finally:
        np.random.default_rng = make


def _on_cpu() -> bool:
    try:
        # Of whole numbers, so that nobody who watches for float32 takes it for the loss's own.
        return torch.empty(0, dtype=torch.int64).device.type == "cpu"
    except Exception:  # the default device may be one that this machine does not have
        return False


def eagerly() -> AbstractContextManager[None]:
    """Run compiled functions as they are written, if torch can do so: compiling tiny batches takes minutes."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


@contextmanager
def unusual_input() -> Iterator[None]:
    """Let a loss compute with NaN and infinity, and make NumPy arrays of what requires grad, without a complaint."""
    there = isinstance(_get_current_function_mode(), AsArrays)
    with np.errstate(all="ignore"), nullcontext() if there else AsArrays():
        yield


class AsArrays(TorchFunctionMode):
    """Let any tensor become a NumPy array, without its gradient, as `float(tensor)` becomes a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy or func is Tensor.__array__:
            with torch._C.DisableTorchFunction():
                plain = args[0].detach()
                return func(plain.float() if plain.dtype == torch.bfloat16 else plain, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
