"""State of the process that a loss may change: random generators, gradient mode, torch's default type and device."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


class RandomState:
    """The state of the global generators of torch, NumPy and Python when it was made; `restore` goes back to it."""

    def __init__(self) -> None:
        # NumPy's old generator is the one that a loss without one of its own draws from.
        self._states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        np.random.set_state(self._states[1])  # noqa: NPY002
        random.setstate(self._states[2])


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
