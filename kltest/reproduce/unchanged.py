"""Comparison of everything with what it was when the main job last ended, so that nothing has to be made again.

One digest is taken of all that results depend on (kltest's own files, those of experiments, figures and the paper, the
libraries, measured speeds, what was asked for) and of every file in the folder of results.
"""

import json
from hashlib import sha256
from pathlib import Path

from kltest.files import as_json, contents, installation, write
from kltest.reproduce.checkout import Checkout

RECORD = ".complete.json"  # its name begins with a dot, as those of all files that are no results


class Unchanged:
    """The inputs of a folder of results; `requested` are the options of the job."""

    def __init__(self, checkout: Checkout, folder: Path, requested: object) -> None:
        self.roots = [checkout.root / name for name in ("experiments", "figures", "paper", "benchmarks")]
        self.folder, self.requested = folder, requested

    def holds(self) -> bool:
        """Return True if `record` was called with all of it as it is now."""
        try:
            return bool(json.loads((self.folder / RECORD).read_text()) == self._digest())
        except (OSError, ValueError):
            return False

    def record(self) -> None:
        """Write down what the results were made of."""
        write(self.folder / RECORD, as_json(self._digest()))

    def _digest(self) -> str:
        found = [list(contents(root)) for root in (*self.roots, self.folder)]
        return sha256(repr((self.requested, installation(), found)).encode()).hexdigest()
