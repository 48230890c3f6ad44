"""The end of a run: at Ctrl-C after its step, and at an error with the step and the activity in words."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kltest.errors import KltestError, TargetError
from kltest.finetune.update import NotFiniteError


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C ask for an end after the present step; a second one ends the run at once.

    In threads other than the main one, which cannot catch signals, Ctrl-C is left as it is.
    """
    requested = threading.Event()

    def request(*_: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    before = signal.signal(signal.SIGINT, request)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def located(step: int, doing: str, save: Callable[[], Path | None]) -> Iterator[None]:
    """Raise KltestError with the step and the activity if a number is not finite, the KL term fails or memory runs out.

    `save` writes the batch and the state for inspection, and returns the path.
    """
    try:
        yield
    except (NotFiniteError, TargetError) as error:
        path = save()
        where = f"; the batch and the state before it are in {path}" if path else ""
        raise KltestError(f"step {step}, {doing}: {str(error).rstrip('.')}{where}") from error
    except (MemoryError, RuntimeError) as error:
        # torch.OutOfMemoryError is a RuntimeError.
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)):
            raise
        lower = {"measuring": "eval_prompts or micro_batch", "generation": "prompts, group_size or max_tokens"}
        raise KltestError(f"step {step}, {doing}: out of memory; lower {lower.get(doing, 'micro_batch')}") from error
