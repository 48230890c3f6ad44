"""Reports of targets that have not changed: `kltest grade --cache`.

There is one entry for each question (target, options, folder). It holds the report and what it depends on: kltest's own
files, whatever is installed, by version, and every other Python file that the graded process had imported, by content.
Data files that a loss reads, and environment variables, are not seen.
"""

import os
import pickle
import sys
import sysconfig
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import kltest
from kltest.files import cache_folder, installation, write
from kltest.report import Report

OWN = Path(kltest.__file__).parent
VARIABLE = "KLTEST_CACHE"
INSTALLED = frozenset({"site-packages", "dist-packages"})


def entry(*question: object) -> Path:
    """Return the file in which the report of a question is kept."""
    asked = repr((os.getcwd(), *question)).encode("utf-8", "backslashreplace")
    return cache_folder(VARIABLE, "grade") / f"{sha256(asked).hexdigest()[:32]}.pickle"


def find(path: Path) -> Report | None:
    """Return the report in an entry; None if there is none, or anything that it depends on has changed."""
    try:
        depends, report = pickle.loads(path.read_bytes())  # the user's own folder, as __pycache__ is
        return report if depends == (installation(), _contents(depends[1])) else None
    except Exception:  # another version's, or half of one: as if there were none
        return None


def keep(path: Path, files: Iterable[str], report: Report) -> None:
    """Write a report that came to its end into its entry."""
    write(path, pickle.dumps(((installation(), _contents(files)), report)))


def imported(home: str) -> list[str]:
    """Return the Python files outside of installed packages that this process has imported, and `home`, the loss's."""
    python = (str(OWN), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    paths = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())} | {home}
    return sorted(
        path
        for path in paths
        if path.endswith(".py")
        and not any(path.startswith(folder + os.sep) for folder in python)
        and not INSTALLED.intersection(Path(path).parts)
        and Path(path).is_file()
    )


def _contents(files: Iterable[str]) -> dict[str, str]:
    return {path: sha256(Path(path).read_bytes()).hexdigest() for path in files}
