"""Doors into real libraries: their KL terms, whole losses and trainers, graded through their own code.

One file a library, each with a `DOOR`. Nothing of a library is copied, and none is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from kltest.errors import UsageError
from kltest.libraries.door import DEPTHS, Depth, Door, Setting
from kltest.suggestions import did_you_mean

__all__ = ["DEPTHS", "NAMES", "Depth", "Door", "Setting", "door", "named", "settings_here"]

NAMES = ("trl", "verl", "openrlhf", "liger", "torchrl", "tunix", "unsloth-zoo")


def door(name: str) -> Door:
    """The door of that name; UsageError if there is none."""
    if name not in NAMES:
        raise UsageError(f"there is no door into {name!r}; {did_you_mean(name, NAMES)}there are {', '.join(NAMES)}")
    return import_module(f"kltest.libraries.{name.replace('-', '_')}").DOOR


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


def named(text: str) -> list[tuple[str, Setting]]:
    """The settings that a target names: all of a library (`verl`), or one (`verl:NAME`); none if it names no door.

    Raises UsageError for a setting that the library does not have, and if the library is not installed.
    """
    name, colon, wanted = text.strip().partition(":")
    if name not in NAMES or (colon and all(part.isidentifier() for part in wanted.split("."))):
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
