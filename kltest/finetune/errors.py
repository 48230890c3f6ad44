"""Failures in the middle of a run: the message says at which step, and the state is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from kltest.errors import KltestError, TargetError


class Interrupt:
    """Context in which Ctrl-C asks for an end after the present step; a second one ends the run at once.

    In threads other than the main one, which cannot catch signals, Ctrl-C is left as it is.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class NotFiniteError(KltestError):
    """A gradient or log-prob is NaN or infinite."""


@contextmanager
def located(step: int, doing: str, save: Callable[[], Path | None]) -> Iterator[None]:
    """Add the step and the activity to the message of a failure.

    Args:
        step: Number of the step.
        doing: measuring, generation or update.
        save: Writes the batch and the state for inspection, and returns the path.

    Raises:
        KltestError: A number was not finite, the KL term failed, or memory ran out.
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
