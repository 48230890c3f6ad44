"""What a search found and what grading told, kept by the content that it was made from."""

import hashlib
import json
from pathlib import Path
from typing import Any

from kltest.errors import KltestError
from kltest.files import installation, write


class Store:
    """JSON by the content of what it was made from, in a folder; nothing is kept without one."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def key(self, *content: Any) -> str:
        """Return a key of the content, which is another one with another kltest or other packages."""
        return hashlib.sha256(json.dumps([installation(), *content]).encode()).hexdigest()

    def read(self, key: str) -> dict[str, Any] | None:
        """Return what is kept; None if there is nothing that can be read."""
        if self.folder is None:
            return None
        try:
            return json.loads((self.folder / f"{key}.json").read_text())  # type: ignore[no-any-return]
        except (OSError, ValueError):
            return None

    def write(self, key: str, value: Any) -> None:
        """Keep a value; a folder that cannot be written saves nothing."""
        if self.folder is not None:
            try:
                write(self.folder / f"{key}.json", json.dumps(value))
            except (OSError, KltestError):
                self.folder = None
