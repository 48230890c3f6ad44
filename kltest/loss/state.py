"""State that a loss keeps between calls: in its module, its closure, its object, or attributes of functions.

It is copied before the first call, so that a call after others can be compared with one that knows of no other. Where
its random generators stand is a matter of chance, and is compared and restored by itself.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from kltest.loss.callables import without_partials
from kltest.loss.reach import MISSING, cells, content, packages_named, reached, values_read

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


# The global generators. NumPy's is the old one, which a loss without a generator of its own draws from.
TORCH = Place("torch's generator", torch.get_rng_state, torch.set_rng_state, drawn=True)
PYTHON = Place("random's generator", random.getstate, random.setstate, drawn=True)
NUMPY = Place("NumPy's generator", np.random.get_state, np.random.set_state, drawn=True)


def generators_of(function: Any, objects: Mapping[str, Any]) -> list[Place]:
    """Return the random generators that a function may draw from, NumPy's global one if it names NumPy.

    To read and write that one takes ten times as long as the other two.
    """
    named = [NUMPY] if "numpy" in packages_named(function) else []
    return [TORCH, PYTHON, *named, *(place for place in places_of(function, objects) if place.drawn)]


def places_of(function: Any, objects: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the places that a function reads or writes, and those of the functions of its module that it calls.

    `objects` are others that it is given in every call, by name.
    """
    bare = without_partials(function)
    itself = getattr(bare, "__self__", None if isinstance(bare, FunctionType) else bare)
    for name, value in {**objects, "self": itself}.items():
        yield from _of_value(name, value)
    for one in reached(function, _in_same_module):
        yield from _attributes(one.__name__, vars(one))
        for value in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()):
            yield from _of_value("a default of a parameter", value, lambda value=value: value, partial(_refill, value))
        closed, space = cells(one), one.__globals__
        for name, value in values_read(one).items():
            if name in closed:
                cell = closed[name]
                put = partial(setattr, cell, "cell_contents")
                yield from _of_value(f"{name} in its closure", value, partial(content, cell), put)
            elif isinstance(value, (*PLAIN, *GENERATORS)) or value is MISSING or _in_same_module(value, one):
                get, put = partial(space.get, name, MISSING), partial(_assign, space, name)
                yield from _of_value(f"{name} of its module", value, get, put)


def _in_same_module(value: Any, function: FunctionType) -> bool:
    return getattr(value, "__module__", None) == function.__module__


def _of_value(name: str, value: Any, get: Read | None = None, put: Write | None = None) -> Iterator[Place]:
    if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
        yield Place(f"the cache of {name}", lambda: value.cache_info().currsize, lambda _: value.cache_clear())
    elif _is_generator(value):
        yield _generator(name, value)
    elif isinstance(value, PLAIN) or value is MISSING:
        if get is not None and put is not None:
            yield Place(name, get, put)
    elif isinstance(value, type):
        yield Place(f"attributes of {name}", partial(_data, value), partial(_set, value))
    elif hasattr(value, "__dict__") and not isinstance(value, FunctionType | ModuleType | torch.nn.Module):
        yield from _attributes(name, vars(value))


def _is_generator(value: Any) -> bool:
    return isinstance(value, tuple(GENERATORS)) and not isinstance(value, random.SystemRandom)


def _generator(name: str, own: Any) -> Place:
    get, put = next(pair for kind, pair in GENERATORS.items() if isinstance(own, kind))
    return Place(name, partial(get, own), partial(put, own), drawn=True)


def _attributes(name: str, present: dict[str, Any]) -> Iterator[Place]:
    """Yield the place of all attributes but the random generators among them, and theirs."""
    yield Place(f"attributes of {name}", partial(_others, present), partial(_fill, present))
    yield from (_generator(f"{name}.{key}", value) for key, value in present.items() if _is_generator(value))


def _others(present: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in present.items() if not _is_generator(value)}


def _fill(present: dict[str, Any], new: dict[str, Any]) -> None:
    for name in _others(present):
        del present[name]
    present.update(new)


def _data(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if isinstance(value, PLAIN) and not name.startswith("__")}


def _set(kind: type, new: dict[str, Any]) -> None:
    for name, value in new.items():
        setattr(kind, name, value)


def _assign(space: dict[str, Any], name: str, new: Any) -> None:
    """Write a module-level name, a container in place: others may hold it."""
    if new is MISSING:
        space.pop(name, None)
    elif not _refill(space.get(name), new):
        space[name] = new


def _refill(old: Any, new: Any) -> bool:
    """Write into a container in place; return False for any other value."""
    if type(old) is not type(new) or not isinstance(old, dict | set | list | deque):
        return False
    old.clear()
    if isinstance(old, list | deque):
        old.extend(new)
    else:
        old.update(new)
    return True


def _small(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(np.prod(value.shape)) <= MOST
    return not isinstance(value, Sized) or len(value) <= MOST


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
