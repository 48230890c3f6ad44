"""What can go wrong in the middle of a run, and what is said and kept then."""

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
    """Ctrl-C ends a run after the present step, with everything kept; a second one ends it at once.

    Where signals cannot be caught (another thread), Ctrl-C stays what it was.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class NotFiniteError(KltestError):
    """A gradient that is NaN or infinite."""


@contextmanager
def told(step: int, doing: str, keep: Callable[[], Path | None]) -> Iterator[None]:
    """Failures say at which step and doing what; `keep` saves the state where numbers are to be looked at."""
    try:
        yield
    except (NotFiniteError, TargetError) as error:
        path = keep()
        where = f"; the batch and the state before it are in {path}" if path else ""
        raise KltestError(f"step {step}, {doing}: {str(error).rstrip('.')}{where}") from error
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        lower = "eval_prompts or micro_batch" if doing == "measuring" else "micro_batch"
        lower = "prompts, group_size or max_tokens" if doing == "generation" else lower
        raise KltestError(f"step {step}, {doing}: out of memory; lower {lower}") from error


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)
