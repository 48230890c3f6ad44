"""Adapters to libraries that no package index has: their functions come from a commit of a repository."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kltest.adapters import Adapter, Setting
from kltest.adapters.installed import found, loaded
from kltest.adapters.standalone import program


def cloned(
    name: str, home: str, commit: str, *loads: Any, settings: Sequence[Setting], find: Callable = found, **others: Any
) -> Adapter:
    """Return the adapter to a library that is checked out.

    Args:
        name: what the command line calls the library, of which its distribution's name is made.
        home: address of the repository.
        commit: the commit that the settings were tried with.
        loads: arguments of `loaded` that bring the library in.
        settings: the known settings, documented defaults first.
        find: what its programs take functions from the library with.
        others: further fields of the adapter, `module` among them.
    """
    fields: dict[str, Any] = {"distribution": name.replace("-", "_"), "installs": (), **others}
    return Adapter(
        name=name,
        version=commit,
        homepage=home,
        repository=home,
        settings=tuple(settings),
        loads=partial(loaded, *loads),
        standalone=partial(program, find=find),
        **fields,
    )
