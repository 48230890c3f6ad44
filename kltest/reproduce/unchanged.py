"""Whether everything is as it was when the main job last ended, so that nothing has to be made again.

One digest is taken of all that results depend on (kltest's own files, those of experiments, figures and the paper, the
libraries, what was asked for) and of every file in the folder of results.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import kltest
from kltest.files import as_json, write
from kltest.reproduce.checkout import Checkout

RECORD = ".complete.json"  # its name begins with a dot, as those of all files that are no results


class Unchanged:
    """What a folder of results was made of; `asked` is what was asked for."""

    def __init__(self, checkout: Checkout, folder: Path, asked: object) -> None:
        own = (checkout.root / name for name in ("experiments", "figures", "paper"))
        self.roots = [Path(kltest.__file__).parent, *own]
        self.folder, self.asked = folder, asked

    def holds(self) -> bool:
        """Return True if `record` was called with all of it as it is now."""
        try:
            return bool(json.loads((self.folder / RECORD).read_text()) == self._digest())
        except (OSError, ValueError):
            return False

    def record(self) -> None:
        write(self.folder / RECORD, as_json(self._digest()))

    def _digest(self) -> str:
        whole = sha256(repr((self.asked, sorted(_versions()))).encode())
        for root in (*self.roots, self.folder):
            for path in sorted(root.rglob("*")):
                parts = path.relative_to(root).parts
                if path.is_file() and "__pycache__" not in parts and not any(part.startswith(".") for part in parts):
                    whole.update(repr((parts, sha256(path.read_bytes()).hexdigest())).encode())
        return whole.hexdigest()


def _versions() -> Iterator[tuple[str, str]]:
    """Versions of whatever is installed: figures and the paper depend on more than results do."""
    for distribution in metadata.distributions():
        yield distribution.name, distribution.version
