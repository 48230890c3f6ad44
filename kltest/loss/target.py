"""Read the text that names a loss: a registered name, a module's function, or a file's. Imports no torch."""

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kltest.errors import UsageError, did_you_mean
from kltest.estimators import find
from kltest.estimators.spec import Estimator

FORMS = "a registered name (k3-loss), package.module:function, or path/to/file.py:function"


@dataclass(frozen=True)
class LossName:
    """A registered estimator, or the dotted `names` of a function in a module or a file that exists."""

    estimator: Estimator | None = None
    module: str = ""
    path: Path | None = None
    names: str = ""


def named(text: str) -> LossName:
    """Return what a text names, `FILE.py::Class::method` as pytest writes it too; nothing is imported.

    Raises:
        UsageError: The text has no known form, or its estimator, file or module does not exist.
    """
    text = text.strip()
    if file := re.fullmatch(r"(?P<path>.+\.py)(?:::?(?P<names>[^/\\]*))?", text):
        return LossName(path=_existing(Path(file["path"])), names=(file["names"] or "").replace("::", "."))
    if "/" in text or "\\" in text or (re.match(r"[A-Za-z]:", text) and not re.fullmatch(r"[A-Za-z]:[\w.]+", text)):
        raise UsageError(f"{text!r} looks like a path; a loss in a file is path/to/file.py:function, a .py file")
    if ":" in text:
        module, _, names = text.partition(":")
        if not (is_dotted(module) and is_dotted(names)):
            raise UsageError(f"{text!r} is no loss; give {FORMS}")
        with searching(Path.cwd()):
            top = module.partition(".")[0]
            if top not in sys.modules and importlib.util.find_spec(top) is None:
                raise UsageError(no_such_module(module, top))
        return LossName(module=module, names=names)
    if "." in text and is_dotted(text):
        module, _, name = text.rpartition(".")
        raise UsageError(f"{text!r}: a function is named behind a colon, {module}:{name}")
    return LossName(find(text))


def is_dotted(text: str) -> bool:
    """Return True for identifiers joined by dots."""
    return all(part.isidentifier() for part in text.split("."))


def _existing(path: Path) -> Path:
    if os.path.isfile(path):  # unlike the path's own method, it answers for names that are too long
        return path.resolve()
    folder = path.parent
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; name a .py file in it, {path}/FILE.py:FUNCTION")
    if not os.path.isdir(folder):
        raise UsageError(f"there is no file {path}: the folder {folder} does not exist (seen from {Path.cwd()})")
    near = did_you_mean(path.name, (entry.name for entry in folder.glob("*.py"))).strip()
    raise UsageError(f"there is no file {path}; {near or f'looked in {folder.resolve()}'}")


@contextmanager
def searching(folder: Path) -> Iterator[None]:
    """Put `folder` first on the module search path, and leave it last there, so that late imports still find it."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(entry)
        if entry not in sys.path:
            sys.path.append(entry)


def no_such_module(module: str, missing: str) -> str:
    """Say that a module, or the part of its name that is `missing`, does not exist, and what is near it."""
    parent, _, last = missing.rpartition(".")
    text = f"there is no module {module!r}" + (f": {parent} has no submodule {last!r}" if parent else "")
    folders = getattr(sys.modules.get(parent), "__path__", []) if parent else [os.getcwd()]
    if hint := did_you_mean(last, (found.name for found in pkgutil.iter_modules(folders))):
        return f"{text}; {hint.strip()}"
    return (
        f"{text} here ({os.getcwd()}) or among the installed packages of {sys.executable}. "
        "Install it there, or name a file: path/to/file.py:function"
    )
