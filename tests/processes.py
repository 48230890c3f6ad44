"""Commands run to their end."""

import subprocess
from pathlib import Path
from typing import Any


def ran(*command: str | Path, **options: Any) -> subprocess.CompletedProcess:
    """Run a command; what it prints is kept as text."""
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, **options})
