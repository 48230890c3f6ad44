"""State that a loss keeps between calls: in its module, its closure, its object, or attributes of functions.

It is copied before the first call, so that a call after others can be compared with one that knows of no other. Random
generators of a loss's own are no such state: where they stand is a matter of chance (kltest.loss.global_state).
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from kltest.loss.callables import inner_of, without_partials

# Random generators, and how the place where one stands is read and set.
GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, new: setattr(own.bit_generator, "state", new),
    ),
}
PLAIN = (bool, int, float, str, type(None), list, dict, set, tuple, deque, torch.Tensor, np.ndarray)
# Entries of a container, and elements of a tensor, that are copied at most.
MOST = 10_000


class MISSING:
    """Stands for a module-level name that has no value yet; a class, since copies of it are itself."""


Read = Callable[[], Any]
Write = Callable[[Any], None]


@dataclass(frozen=True)
class Place:
    """A place for state: its name in messages, and how to read and write it; `drawn`: it is a random generator's."""

    name: str
    get: Read
    put: Write
    drawn: bool = False


class State:
    """The content of some places, as it was when this was made.

    Where a random generator stands is read as a copy, and is written as fast as it is compared.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._before: list[tuple[Place, Any]] = []
        for place in places:
            with suppress(Exception):  # what cannot be copied is not looked at
                value = place.get()
                if place.drawn:
                    self._before.append((place, value))
                elif _small(value):
                    self._before.append((place, copy.deepcopy(value)))

    def now(self) -> "State":
        """Return the same places as they are now."""
        return State(place for place, _ in self._before)

    def changed(self) -> list[str]:
        """Return the names of what is no longer as it was."""
        names = []
        for place, before in self._before:
            with suppress(Exception):
                names += [] if same(place.get(), before) else [place.name]
        return list(dict.fromkeys(names))

    def reset(self) -> None:
        """Make everything as it was."""
        for place, before in self._before:
            with suppress(Exception):
                if place.drawn:
                    place.put(before)
                elif not same(place.get(), before):
                    place.put(copy.deepcopy(before))


def generator(name: str, own: Any) -> Place:
    """Return the place of a random generator: where it stands."""
    get, put = next(pair for kind, pair in GENERATORS.items() if isinstance(own, kind))
    return Place(name, partial(get, own), partial(put, own), drawn=True)


def _is_generator(value: Any) -> bool:
    return isinstance(value, tuple(GENERATORS)) and not isinstance(value, random.SystemRandom)


def places_of(function: Any, objects: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the places that a function reads or writes, and those of the functions of its module that it calls.

    `objects` are others that it is given in every call, by name.
    """
    for name, value in objects.items():
        yield from _of_value(name, value)
    bare = without_partials(function)
    yield from _of_value("self", getattr(bare, "__self__", None if isinstance(bare, FunctionType) else bare))
    seen: set[int] = set()
    waiting = [inner_of(function)]
    while waiting:
        one = waiting.pop()
        one = getattr(one, "__wrapped__", one)
        if not isinstance(one, FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        yield from _attributes(one.__name__, vars(one))
        defaults = {str(place): value for place, value in enumerate(one.__defaults__ or ())}
        defaults |= one.__kwdefaults__ or {}
        for name, value in defaults.items():
            get, put = partial(defaults.get, name), partial(_assign, defaults, name)
            yield from _of_value("a default of a parameter", value, get, put)
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            get, put = partial(_content, cell), partial(setattr, cell, "cell_contents")
            yield from _of_value(f"{name} in its closure", get(), get, put)
            waiting.append(get())
        space = one.__globals__
        for name in _names(one.__code__):
            value = space.get(name, MISSING)
            own = getattr(value, "__module__", None) == one.__module__
            waiting += [value] * own
            if own or isinstance(value, PLAIN) or _is_generator(value) or value is MISSING:
                get, put = partial(space.get, name, MISSING), partial(_assign, space, name)
                yield from _of_value(f"{name} of its module", value, get, put)


def _of_value(name: str, value: Any, get: Read | None = None, put: Write | None = None) -> Iterator[Place]:
    if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
        yield Place(f"the cache of {name}", lambda: value.cache_info().currsize, lambda _: value.cache_clear())
    elif _is_generator(value):
        yield generator(name, value)
    elif isinstance(value, PLAIN) or value is MISSING:
        if get is not None and put is not None:
            yield Place(name, get, put)
    elif isinstance(value, type):
        yield Place(f"attributes of {name}", partial(_data, value), partial(_set, value))
    elif hasattr(value, "__dict__") and not isinstance(value, FunctionType | ModuleType | torch.nn.Module):
        yield from _attributes(name, vars(value))


def _content(cell: CellType) -> Any:
    """Return the value of a closure's variable, None before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attributes(name: str, present: dict[str, Any]) -> Iterator[Place]:
    """Yield the place of all attributes but the random generators among them, and theirs."""
    yield Place(f"attributes of {name}", partial(_others, present), partial(_fill, present))
    yield from (generator(f"{name}.{key}", value) for key, value in present.items() if _is_generator(value))


def _others(present: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in present.items() if not _is_generator(value)}


def _set(kind: type, new: dict[str, Any]) -> None:
    for name, value in new.items():
        setattr(kind, name, value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _data(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if isinstance(value, PLAIN) and not name.startswith("__")}


def _fill(present: dict[str, Any], new: dict[str, Any]) -> None:
    for name in _others(present):
        del present[name]
    present.update(new)


def _assign(space: dict[str, Any], name: str, new: Any) -> None:
    """Write a module-level name, a container in place: others may hold it."""
    old = space.get(name)
    if new is MISSING:
        space.pop(name, None)
    elif isinstance(old, dict | set) and type(old) is type(new):
        old.clear()
        old.update(new)
    elif isinstance(old, list) and isinstance(new, list):
        old[:] = new
    else:
        space[name] = new


def _small(value: Any) -> bool:
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)
    size = len(value) if isinstance(value, list | dict | set | tuple | deque) else size
    return not isinstance(size, int) or size <= MOST


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal, entry by entry."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        if set(map(type, one)) == {int}:  # as the 625 words of random's generator
            return bool(one == other)
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__") and not isinstance(one, FunctionType | type):
        return same(vars(one), vars(other))
    return bool(one == other)
