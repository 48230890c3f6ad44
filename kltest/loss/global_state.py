"""Settings of the process that a loss may find, and may change: set as grading needs them, and put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


@contextmanager
def preserved() -> Iterator[None]:
    """Gradients on, tensors on the CPU by default; at the end all is as before, the states of random generators too."""
    python, torchs = random.getstate(), torch.get_rng_state()
    numpy = np.random.get_state()  # noqa: NPY002 (what losses draw from is what is kept)
    with ExitStack() as stack:
        # `torch.device` slows every call to torch down, and nearly nobody needs it.
        if not _on_cpu():
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(settings_preserved())
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            torch.set_rng_state(torchs)


@contextmanager
def settings_preserved() -> Iterator[None]:
    """What runs inside may turn gradients off, or set torch's default device or type: that does not outlast it."""
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
