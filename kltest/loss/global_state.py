"""State of the process that a loss may change (random generators, torch's settings), and modes that it is called in."""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Calls that leave NumPy's generator alone before it is taken for unused.
QUIET = 8


class RandomState:
    """The state of the global generators of torch, NumPy and Python when it was made; `restore` goes back to it.

    Without `numpy`, NumPy's is left as it is: to read and write it takes ten times as long as the other two together.
    """

    def __init__(self, *, numpy: bool = True) -> None:
        self._states = torch.get_rng_state(), random.getstate()
        # NumPy's old generator is the one that a loss without one of its own draws from.
        self._numpy = np.random.get_state() if numpy else None  # noqa: NPY002

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        random.setstate(self._states[1])
        if self._numpy is not None:
            np.random.set_state(self._numpy)  # noqa: NPY002

    @property
    def numpy_moved(self) -> bool:
        """True if NumPy's generator has been drawn from since."""
        if self._numpy is None:
            return False
        pairs = zip(self._numpy, np.random.get_state(), strict=True)  # noqa: NPY002
        return not all(np.array_equal(before, now) for before, now in pairs)


class SameNoise:
    """Repeats the random numbers of one loss's calls; NumPy's only as long as QUIET calls in a row did not draw any."""

    def __init__(self) -> None:
        self._quiet = 0

    def state(self) -> RandomState:
        return RandomState(numpy=self._quiet < QUIET)

    def restore(self, state: RandomState) -> None:
        """Go back to a state, and note if the call after it drew from NumPy's generator."""
        self._quiet = 0 if state.numpy_moved else self._quiet + 1
        state.restore()


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
            before.restore()


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
