"""Commands run to their end."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def ran(*command: str | Path, **options: Any) -> subprocess.CompletedProcess:
    """Run a command; what it prints is kept as text."""
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, **options})


def until(condition: Callable[..., object], *arguments: object) -> None:
    """Wait up to a minute for a condition that another process brings about."""
    late = time.monotonic() + 60
    while not condition(*arguments):
        assert time.monotonic() < late, "it never came about"
        time.sleep(0.02)


def written(path: Path, lines: int = 1) -> bool:
    """Whether a file is there and has that many lines."""
    return path.exists() and path.read_bytes().count(b"\n") >= lines
