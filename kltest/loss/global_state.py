"""State of the process that a loss may change (random generators, torch's settings), and modes that it is called in."""

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.loss.state import Place, State

# The global generators. NumPy's is the old one, which a loss without a generator of its own draws from.
TORCH = Place("torch's generator", torch.get_rng_state, torch.set_rng_state, drawn=True)
PYTHON = Place("random's generator", random.getstate, random.setstate, drawn=True)
NUMPY = Place("NumPy's generator", np.random.get_state, np.random.set_state, drawn=True)
# Bytes of NumPy's generator: 624 words and the number of those that were used.
MERSENNE_TWISTER = 4 * 625


class RandomState(State):
    """The state of random generators when it was made: the global ones, and others.

    Without `numpy`, NumPy's is not restored: to read and write it takes ten times as long as the other two together.
    """

    def __init__(self, *own: Place, numpy: bool = True) -> None:
        super().__init__((TORCH, PYTHON, *[NUMPY] * numpy, *own))
        self._numpy = _numpy_stands()

    @property
    def moved(self) -> bool:
        """True if a generator has been drawn from since."""
        return bool(self.changed()) or self.numpy_moved

    @property
    def numpy_moved(self) -> bool:
        """True if NumPy's generator has been drawn from since."""
        return self._numpy != _numpy_stands()


def _numpy_stands() -> bytes:
    """Return where NumPy's generator stands: its memory, which is read ten times as fast as its state is."""
    bits = np.random.mtrand.get_bit_generator()
    if isinstance(bits, np.random.MT19937):
        return ctypes.string_at(bits.ctypes.state_address, MERSENNE_TWISTER)
    return repr(bits.state).encode()


@contextmanager
def preserved(seed: int | None = None) -> Iterator[None]:
    """Preserve the global state: whatever runs inside leaves random generators and torch's settings as they were.

    Inside, gradients are on and tensors are made on the CPU.

    Args:
        seed: the generators of torch, NumPy and Python begin there; None leaves them as they are.
    """
    before = RandomState()
    with ExitStack() as stack:
        # `torch.device` slows every call of torch down, and nearly nobody needs it.
        if not _on_cpu():
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(settings_preserved())
        if seed is not None:
            torch.manual_seed(seed)
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
