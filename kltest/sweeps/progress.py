"""Progress of long work: a bar with the time left on a terminal, a plain line each ten percent elsewhere."""

import sys
import time
from typing import Any, Self

PAUSE = 5.0
"""Seconds between two lines that say what is under way."""


class Progress:
    """Progress of `total` steps, as a context manager. Steps that were `done` before are shown but not timed."""

    def __init__(self, label: str, total: int, *, done: int = 0) -> None:
        self.label, self.total, self.done = label, total, done
        self.stream = sys.stderr
        self._before, self._started, self._shown = done, time.monotonic(), -1
        self._next = self._started + 1
        self._bar = self._drawn() if self.stream.isatty() else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, what: str = "", *, by: int = 1, stays: str = "", total: int | None = None) -> None:
        """Count `by` more steps as finished, of a `total` that may have become known since.

        `what` names the last, and the line `stays` is left above the bar.
        """
        self.done += by
        self.total = self.total if total is None else total
        if self._bar:
            if stays:
                self._bar.console.print(stays, markup=False, highlight=False, soft_wrap=True)
            self._bar.update(self._bar.task_ids[0], advance=by, total=self.total, what=what)
            return
        percent = 100 * self.done // self.total
        if percent // 10 > self._shown:
            self._shown = percent // 10
            left = f", {self._left()} left" if self.done < self.total else ""
            line = f"{self.label}: {percent:3d} % ({self.done} of {self.total}{left}) {what}"
            print(line.rstrip(), file=self.stream, flush=True)

    def say(self, what: str) -> None:
        """Show what is under way, which is no step yet; where nothing is drawn, a line every `PAUSE` seconds."""
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], what=what)
        elif now >= self._next:
            self._next = now + PAUSE
            print(f"{self.label}: {what}", file=self.stream, flush=True)

    def _left(self) -> str:
        speed = (time.monotonic() - self._started) / max(self.done - self._before, 1)
        minutes, seconds = divmod(round(speed * (self.total - self.done)), 60)
        return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

    def _drawn(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        what = TextColumn("[dim]{task.fields[what]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), what)
        bar = Bar(*columns, console=Console(file=self.stream))
        bar.add_task(self.label, total=self.total, completed=self.done, what="")
        return bar
