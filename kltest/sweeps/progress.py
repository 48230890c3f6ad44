"""How far the work is: a bar with the time left on a terminal, a plain line per percent elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TextIO


class Progress(AbstractContextManager["Progress"]):
    """Counts `total` steps of a piece of work. Steps that were `done` before are shown but not timed."""

    def __init__(self, label: str, total: int, *, done: int = 0, stream: TextIO | None = None) -> None:
        self.label, self.total, self.done = label, total, done
        self.stream = stream if stream is not None else sys.stderr
        self._before, self._started, self._shown = done, time.monotonic(), -1
        self._bar = _Bar(self) if self.stream.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, what: str = "", *, by: int = 1) -> None:
        """`by` more steps are finished; `what` names the last."""
        self.done += by
        if self._bar:
            self._bar.update(what, by)
            return
        percent = 100 * self.done // self.total
        if percent > self._shown:
            self._shown = percent
            left = f", {_duration(self.seconds_left())} left" if self.done < self.total else ""
            print(f"{self.label}: {percent:3d} % ({self.done} of {self.total}{left}) {what}".rstrip(), file=self.stream)
            self.stream.flush()

    def seconds_left(self) -> float:
        """At the mean speed so far."""
        finished = self.done - self._before
        return (time.monotonic() - self._started) / max(finished, 1) * (self.total - self.done)


class _Bar:
    """The bar itself; rich, which typer brings, draws it."""

    def __init__(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[what]}"),
        )
        self._rich = RichProgress(*columns, console=Console(file=progress.stream), transient=False)
        self._task = self._rich.add_task(progress.label, total=progress.total, completed=progress.done, what="")

    def start(self) -> None:
        self._rich.start()

    def stop(self) -> None:
        self._rich.stop()

    def update(self, what: str, by: int) -> None:
        self._rich.update(self._task, advance=by, what=what)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
