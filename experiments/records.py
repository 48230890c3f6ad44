"""Recorded tables, which take hours or another machine to make, as rows; and numbers as they are kept there."""

import csv
from hashlib import sha256
from pathlib import Path
from typing import Any

from kltest.files import literal


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the values of a table, without those that are empty; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: literal(text) for name, text in line.items() if text} for line in csv.DictReader(file)]


def content(path: Path) -> str:
    """Return a short name for what is in a file: part of a configuration whose rows depend on it."""
    return sha256(path.read_bytes()).hexdigest()[:8] if path.exists() else "absent"


def rounded(value: Any, figures: int) -> Any:
    """Return a float with so many significant figures; anything else as it is."""
    return float(f"{value:.{figures}g}") if isinstance(value, float) else value
