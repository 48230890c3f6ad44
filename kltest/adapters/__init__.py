"""Doors into real libraries: their KL terms, whole losses and trainers, graded through their own code.

One file a library, each with a `DOOR`. Nothing of a library is copied, and none is imported before it is used.
"""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kltest.adapters.adapter import DEPTHS, Depth, Door, Setting
from kltest.errors import UsageError, did_you_mean

__all__ = ["DEPTHS", "NAMES", "Depth", "Door", "Setting", "door", "named", "settings_here"]

NAMES = ("trl", "verl", "openrlhf", "liger", "torchrl", "tunix", "unsloth-zoo")


def door(name: str) -> Door:
    """The door of that name, or the `DOOR` of a Python file; UsageError if there is none."""
    if name.endswith(".py"):
        return _door_of(Path(name))
    if name not in NAMES:
        raise UsageError(
            f"there is no door into {name!r}; {did_you_mean(name, NAMES)}there are {', '.join(NAMES)}, "
            "and a file of your own may hold one: path/to/file.py"
        )
    return import_module(f"kltest.adapters.{name.replace('-', '_')}").DOOR


def _door_of(path: Path) -> Door:
    if not path.is_file():
        raise UsageError(f"{path} does not exist; a door of your own is a Python file with a DOOR")
    try:
        found = runpy.run_path(str(path)).get("DOOR")
    except Exception as error:
        raise UsageError(f"{path} cannot be run: {type(error).__name__}: {error}") from None
    if not isinstance(found, Door):
        raise UsageError(f"{path} has no DOOR of the kind kltest.adapters.Door")
    return found


def settings_here(library: Door) -> tuple[Setting, ...]:
    """The settings of a library as it is installed here: those that are known, then those that it has beside them.

    Imports the library. Raises UsageError if it is not installed.
    """
    if find_spec(library.module.partition(".")[0]) is None:
        pip = " && ".join(
            f"pip install {' '.join(arguments).format(version=library.version)}" for arguments in library.installs
        )
        raise UsageError(
            f"{library.name} is not installed here. `kltest libraries {library.name}` grades it in an environment of "
            f"its own; for this one: {pip}"
        )
    try:
        import_module(library.module)
        more = library.discover() if library.discover else ()
    except Exception:
        # Whatever is wrong there, each setting says it when it is graded; and some functions are lifted from a file.
        more = ()
    return (*library.settings, *more)


def _split(text: str) -> tuple[str, str, str]:
    """A target as door, colon and setting; no door where it cannot name one. A file alone is not its door."""
    own = re.fullmatch(r"(.+\.py):(.+)", text)
    if own:
        return own[1], ":", own[2]
    name, colon, wanted = text.partition(":")
    return (name, colon, wanted) if name in NAMES else ("", "", "")


def named(text: str) -> list[tuple[str, Setting]]:
    """The settings that a target names: all of a library (`verl`), or one (`verl:NAME`); none if it names no door.

    Raises UsageError for a setting that the library does not have, and if the library is not installed.
    """
    name, colon, wanted = _split(text.strip())
    if not name or (colon and all(part.isidentifier() for part in wanted.split("."))):
        return []
    library = door(name)
    if not colon:
        return [(f"{name}:{setting.name}", setting) for setting in settings_here(library)]
    setting = library.setting(wanted)
    there = library.settings if setting else settings_here(library)
    setting = setting or next((one for one in there if one.name == wanted), None)
    if setting is None:
        known = [one.name for one in there]
        raise UsageError(
            f"{name} has no setting {wanted!r}; {did_you_mean(wanted, known)}"
            f"`kltest libraries --list {name}` shows its {len(known)}"
        )
    return [(f"{name}:{wanted}", setting)]
