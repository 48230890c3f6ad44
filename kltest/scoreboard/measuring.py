"""Processes that measure a library inside its virtual environment, several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from kltest.errors import KltestError
from kltest.scoreboard.installation import Installed

PATIENCE = 5.0


def cores() -> int:
    """Number of processes that can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Measuring:
    """`workers` processes that share the settings of an adapter.

    Args:
        name: the adapter's name, or its file.
        installed: the environment of the library.
        arguments: further arguments of `kltest.scoreboard.measure`.
    """

    name: str
    installed: Installed
    arguments: Sequence[str] = ()
    workers: int = field(default_factory=cores)

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield the names of the settings, then their rows as they are finished.

        Raises:
            KltestError: a process ended early; all its rows have been yielded before.
        """
        answers: Queue[tuple[int, bytes]] = Queue()
        with contextlib.ExitStack() as stack:
            claims = stack.enter_context(tempfile.TemporaryDirectory(dir=self.installed.scratch))
            command = self.installed.command("-m", "kltest.scoreboard.measure", self.name, "--claims", claims)
            processes = [
                stack.enter_context(_running([*command, *self.arguments], self.installed, self._log(k)))
                for k in self._all
            ]
            for number, process in enumerate(processes):
                Thread(target=_listen, args=(number, process, answers), daemon=True).start()
            listening = set(self._all)
            named = False
            while listening:
                number, line = answers.get()
                if not line:
                    listening.remove(number)
                    continue
                answer = json.loads(line)
                # Every process names the settings.
                if not (named and "settings" in answer):
                    yield answer
                named = named or "settings" in answer
            codes = [process.wait() for process in processes]
        for number, code in enumerate(codes):
            if code:
                raise KltestError(_last_words(code, self._log(number)))

    @property
    def _all(self) -> range:
        return range(self.workers)

    def _log(self, number: int) -> Path:
        return self.installed.scratch / f"measure-{number}.log"


@contextlib.contextmanager
def _running(command: Sequence[str], installed: Installed, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=installed.scratch,
            env=installed.environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield process
    finally:
        # A terminated process ends its children; a killed one cannot.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        process.kill()
        process.wait()


def _listen(number: int, process: subprocess.Popen[bytes], answers: Queue[tuple[int, bytes]]) -> None:
    """Queue the lines of a process, and an empty line at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        answers.put((number, line))
    answers.put((number, b""))


def _last_words(code: int, log: Path) -> str:
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    return f"measuring ended with exit code {code}: {last} (all of it: {log})"
