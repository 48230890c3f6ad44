"""Adapters to real libraries: their KL terms, whole losses and trainers, graded through their own code.

One folder a library: `__init__` holds the settings as data (`ADAPTER`), `calls` calls the library, `recipes` holds code
or settings that follow the true gradient. No code of a library is copied, and no library is imported before it is used.
"""

from __future__ import annotations

import re
import runpy
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kltest.adapters.adapter import DEPTHS, Adapter, Depth, Setting
from kltest.errors import UsageError, did_you_mean

__all__ = ["DEPTHS", "NAMES", "Adapter", "Depth", "Setting", "find", "installed_settings", "named"]

NAMES = ("trl", "verl", "openrlhf", "liger", "torchrl", "tunix", "unsloth-zoo")


def find(name: str) -> Adapter:
    """Return the adapter of that name, or the `ADAPTER` of a Python file.

    Raises:
        UsageError: there is no such adapter, or the file holds none.
    """
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in NAMES:
        raise UsageError(
            f"there is no adapter to {name!r}; {did_you_mean(name, NAMES)}there are {', '.join(NAMES)}, "
            "and a file of your own may hold one: path/to/file.py"
        )
    return import_module(f"kltest.adapters.{name.replace('-', '_')}").ADAPTER


def _from_file(path: Path) -> Adapter:
    if not path.is_file():
        raise UsageError(f"{path} does not exist; an adapter of your own is a Python file with an ADAPTER")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise UsageError(f"{path} cannot be run: {type(error).__name__}: {error}") from None
    if "ADAPTER" not in names and "DOOR" in names:
        warnings.warn(f"{path}: DOOR is now called ADAPTER", DeprecationWarning, stacklevel=3)
    found = names.get("ADAPTER", names.get("DOOR"))
    if not isinstance(found, Adapter):
        raise UsageError(f"{path} has no ADAPTER of the kind kltest.adapters.Adapter")
    return found


def __getattr__(name: str) -> Any:
    if name != "Door":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("kltest.adapters.Door is now called Adapter", DeprecationWarning, stacklevel=2)
    return _door


def _door(*, reproduction: Any = None, **fields: Any) -> Adapter:
    """An adapter from its former arguments, for one release."""
    return Adapter(standalone=reproduction, **fields)


def installed_settings(library: Adapter) -> tuple[Setting, ...]:
    """Return the known settings of a library, then those that only its installed version has.

    Imports the library.

    Raises:
        UsageError: the library is not installed.
    """
    if find_spec(library.module.partition(".")[0]) is None:
        pip = " && ".join(f"pip install {' '.join(call)}" for call in library.installs).format(version=library.version)
        raise UsageError(
            f"{library.name} is not installed here. `kltest libraries {library.name}` grades it in an environment of "
            f"its own; for this one: {pip}"
        )
    try:
        import_module(library.module)
        more = library.discover() if library.discover else ()
    except Exception:
        # Each setting reports the failed import when it is graded; some functions are lifted and need no import.
        more = ()
    return (*library.settings, *more)


def named(text: str) -> list[tuple[str, Setting]]:
    """Return the settings that a target names: all of a library (`verl`), one (`verl:NAME`), or none.

    Raises:
        UsageError: the library does not have the setting, or is not installed.
    """
    own = re.fullmatch(r"(.+\.py):(.+)", text.strip())
    name, colon, wanted = (own[1], ":", own[2]) if own else text.strip().partition(":")
    if not (own or name in NAMES) or (colon and all(part.isidentifier() for part in wanted.split("."))):
        return []
    library = find(name)
    if not colon:
        return [(f"{name}:{setting.name}", setting) for setting in installed_settings(library)]
    setting = library.setting(wanted)
    there = library.settings if setting else installed_settings(library)
    setting = setting or next((one for one in there if one.name == wanted), None)
    if setting is None:
        known = [one.name for one in there]
        raise UsageError(
            f"{name} has no setting {wanted!r}; {did_you_mean(wanted, known)}"
            f"`kltest libraries --list {name}` shows its {len(known)}"
        )
    return [(f"{name}:{wanted}", setting)]
