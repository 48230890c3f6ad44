"""Import the function that `package.module:function` or `path/to/file.py:function` names, or say why not."""

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from kltest.errors import UsageError, did_you_mean
from kltest.loss.callables import kind_of
from kltest.loss.frames import describe, failure, raised_as
from kltest.loss.target import no_such_module, searching

_NOTHING = object()


@dataclass(frozen=True)
class Imported:
    """A function that was found; `owner` is the class whose plain method it is, None if it needs no `self`."""

    function: Any
    owner: type | None = None
    notes: tuple[str, ...] = ()


class ImportFailedError(Exception):
    """Importing a module that exists failed; the cause is what it raised."""


def import_by_name(module: str) -> ModuleType:
    """Import the module of that name, from the current directory too, as `python -m` does.

    Raises UsageError if there is none, ImportFailedError if there is one and importing it raised.
    """
    with searching(Path.cwd()), raised_as(partial(_unimported, module=module)):
        return importlib.import_module(module)


def _unimported(error: BaseException, module: str = "") -> Exception:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return UsageError(no_such_module(module, error.name))
    return ImportFailedError(describe(error))


def import_file(path: Path) -> ModuleType:
    """Import the module in a file, as part of its package if `__init__.py` files make one; never as `__main__`.

    Raises ImportFailedError if importing it raised, or if its package's name is taken by another that is loaded.
    """
    root, name = package_of(path)
    with searching(root), raised_as(_unimported):
        if "." in name:
            module = importlib.import_module(name)
            if Path(str(module.__file__)).resolve() != path:
                raise ImportError(f"the name {name} belongs to {module.__file__}, which is loaded already")
            return module
        spec = importlib.util.spec_from_file_location(f"kltest_target_{name}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python source file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


def package_of(path: Path) -> tuple[Path, str]:
    """Return the folder to import a file from, and its dotted name there."""
    folder, parts = path.parent, [] if path.stem == "__init__" else [path.stem]
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def source_of(module: str) -> Path | None:
    """Return the file of a module, without executing any package above it; None if there is no such file."""
    parts = module.split(".")
    with searching(Path.cwd()):
        try:
            spec = importlib.util.find_spec(parts[0])
            for depth in range(2, len(parts) + 1):
                if spec is None or spec.submodule_search_locations is None:
                    return None
                spec = PathFinder.find_spec(".".join(parts[:depth]), list(spec.submodule_search_locations))
        except (ImportError, ValueError, AttributeError, KeyError):  # a folder without __init__.py has no module
            return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin).resolve()


def attribute(holder: Any, names: str, where: str) -> Imported:
    """Look up `Class.method` and the like; UsageError if it is not there or cannot be called."""
    owner, thing = None, holder
    for name in names.split("."):
        parent = thing
        with raised_as(partial(failure, f"{where}: getting {name!r}")):
            thing = getattr(parent, name, _NOTHING)
        if thing is _NOTHING:
            near = did_you_mean(name, (key for key in dir(parent) if not key.startswith("__"))).strip()
            defined = [key for key, value in getattr(parent, "__dict__", {}).items() if callable(value)]
            listed = ", ".join(key for key in defined if not key.startswith("_")) or "no functions"
            raise UsageError(f"{where} has no {name!r}; {near or f'it defines {listed[:500]}'}")
        plain = inspect.isclass(parent) and inspect.isfunction(inspect.getattr_static(parent, name))
        owner = parent if plain else None
        where = f"{where}{'.' if parent is not holder else ':'}{name}"
    if not callable(thing):
        raise UsageError(f"{where} is {kind_of(thing)} and cannot be called; name a function")
    return Imported(thing, owner)
