"""State that a loss keeps between calls: what it can reach and change, in its module, closure, object or attributes.

Its content is copied before the first call, so that a call after others can be compared with one that knows of no
other. Where its random generators stand is a matter of chance, and is compared and restored by itself.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from kltest.loss.callables import without_partials
from kltest.loss.reach import MISSING, cells, is_own, packages_named, reached, values_read

# Entries of a container, and elements of a tensor, that are copied at most; objects inside objects that are looked at.
MOST, DEEPEST = 10_000, 6


@dataclass(frozen=True)
class Place:
    """A place for state: its name in messages, and how to copy and write its content.

    `seed` lets a random generator begin at a number; None for all other places.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    seed: Callable[[int], object] | None = None

    @property
    def drawn(self) -> bool:
        """True for a random generator's."""
        return self.seed is not None


class State:
    """The content of some places, as it was when this was made."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._before: list[tuple[Place, Any]] = []
        for place in places:
            with suppress(Exception):  # what cannot be copied is not looked at
                self._before.append((place, place.get()))

    def now(self) -> "State":
        """Return the same places as they are now."""
        return State(place for place, _ in self._before)

    def changed(self) -> list[str]:
        """Return the names of what is no longer as it was."""
        names = []
        for place, before in self._before:
            with suppress(Exception):  # what cannot be compared
                names += [] if same(place.get(), before) else [place.name]
        return list(dict.fromkeys(names))

    def reset(self) -> None:
        """Make everything as it was."""
        for place, before in self._before:
            with suppress(Exception):
                # A generator is written as fast as it is compared.
                if place.drawn or not _seems_same(place, before):
                    place.put(before)


def _seems_same(place: Place, before: Any) -> bool:
    try:
        return same(place.get(), before)
    except Exception:  # what cannot be compared, as what is left of a tensor that torch.vmap mapped over
        return False


def same(one: Any, other: Any) -> bool:
    """Return True if the content of a place is the same; what it holds is a place of its own if it can change."""
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
    if isinstance(one, list | deque) or (isinstance(one, tuple) and any(isinstance(each, np.ndarray) for each in one)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


def _rewrite(tensor: torch.Tensor, content: torch.Tensor) -> None:
    tensor.data.copy_(content)


Kinds = dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]]
# Random generators: functions that copy and write where one stands, and one that lets it begin at a number.
GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object], Callable[[Any, int], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state, torch.Generator.manual_seed),
    random.Random: (random.Random.getstate, random.Random.setstate, random.Random.seed),
    np.random.RandomState: (
        np.random.RandomState.get_state,
        np.random.RandomState.set_state,
        np.random.RandomState.seed,
    ),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, new: setattr(own.bit_generator, "state", new),
        lambda own, seed: setattr(own.bit_generator, "state", type(own.bit_generator)(seed).state),
    ),
}
# Types that change in place: functions that copy and write their content.
CONTAINERS: Kinds = {kind: (lambda container: container.copy(), _refill) for kind in (dict, list, set, deque)}
CONTENTS: Kinds = {
    **CONTAINERS,
    torch.Tensor: (lambda tensor: tensor.detach().clone(), _rewrite),
    np.ndarray: (np.copy, np.copyto),
    **{kind: (get, put) for kind, (get, put, _) in GENERATORS.items()},
}
PLAIN: tuple[type, ...] = (bool, int, float, str, type(None), tuple, *CONTENTS)
# The global generators. NumPy's is the old one, which a loss without a generator of its own draws from.
TORCH = Place("torch's generator", torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed)
PYTHON = Place("random's generator", random.getstate, random.setstate, random.seed)
NUMPY = Place("NumPy's generator", np.random.get_state, np.random.set_state, np.random.seed)


def generators_of(function: Any, objects: Mapping[str, Any]) -> list[Place]:
    """Return the random generators that a function may draw from, NumPy's global one if it names NumPy.

    To read and write that one takes ten times as long as the other two.
    """
    named = [NUMPY] if "numpy" in packages_named(function) else []
    return [TORCH, PYTHON, *named, *(place for place in places_of(function, objects) if place.drawn)]


def places_of(function: Any, objects: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the places that a function reads or writes, and those of the functions of its project that it calls.

    `objects` are others that it is given in every call, by name.
    """
    seen: dict[int, Any] = {}
    bare = without_partials(function)
    itself = getattr(bare, "__self__", None if isinstance(bare, FunctionType) else bare)
    for name, value in {"self": itself, **objects}.items():
        yield from _inside(name, value, seen)
    for one in functions_of(function):
        yield from _inside(f"attributes of {one.__name__}", vars(one), seen)
        yield from _inside("a default of a parameter", [one.__defaults__, one.__kwdefaults__], seen)
        closed, read = cells(one), values_read(one)
        for name, value in read.items():
            if name in closed:
                cell, label = closed[name], f"{name} in its closure"
                yield Place(label, partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
            elif isinstance(value, PLAIN) or value is MISSING or _of_its_project(value, one):
                module, _, key = name.rpartition(".")
                space = vars(read[module]) if module else one.__globals__
                label = f"{key} of {module or 'its module'}"
                yield Place(label, partial(space.get, key, MISSING), partial(_assign, space, key))
            else:
                continue
            yield from _inside(label, value, seen)


def functions_of(function: Any) -> Iterator[FunctionType]:
    """Yield the functions that run when a loss is called: its own and those of its project that it calls."""
    return reached(function, _of_its_project)


def numbers_of(function: Any, objects: Mapping[str, Any]) -> set[int]:
    """Return the whole numbers in the code of a function and of its project's, and in what they read.

    Those of tensors, containers and objects are among them.
    """
    values = [place.get() for place in places_of(function, objects) if not place.drawn]
    for one in functions_of(function):
        values += [one.__code__, *values_read(one).values()]
    found: set[int] = set()
    for value in values:
        found |= set(_whole_numbers(value, DEEPEST))
    return found


def _whole_numbers(value: Any, deep: int) -> Iterator[int]:
    if not deep or _size(value) > MOST:
        return
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.reshape(-1).tolist()
    if isinstance(value, CodeType):
        value = value.co_consts
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        for each in value:
            yield from _whole_numbers(each, deep if isinstance(each, CodeType) else deep - 1)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        yield int(value)


def _of_its_project(value: Any, function: FunctionType) -> bool:
    module = getattr(value, "__module__", None)
    return module == function.__module__ or (isinstance(module, str) and is_own(module))


def _inside(name: str, value: Any, seen: dict[int, Any], deep: int = DEEPEST) -> Iterator[Place]:
    """Yield the places inside a value, at any depth; `seen` are values that need no second look, by their `id`."""
    if id(value) in seen or not deep or _size(value) > MOST:
        return
    seen[id(value)] = value
    if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
        yield Place(f"the cache of {name}", lambda: value.cache_info().currsize, lambda _: value.cache_clear())
    elif kind := next((kind for kind in CONTENTS if isinstance(value, kind)), None):
        get, put = CONTENTS[kind]
        seed = partial(GENERATORS[kind][2], value) if kind in GENERATORS else None
        yield Place(name, partial(get, value), partial(put, value), seed)
    elif isinstance(value, type):
        attributes = f"attributes of {name.removeprefix('attributes of ')}"
        data = {key: each for key, each in vars(value).items() if isinstance(each, PLAIN) and not key.startswith("__")}
        for key, each in data.items():
            yield Place(attributes, partial(getattr, value, key), partial(setattr, value, key))
            yield from _inside(attributes, each, seen, deep - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, FunctionType | ModuleType):
        attributes = f"attributes of {name.removeprefix('attributes of ')}"
        yield from _inside(attributes, vars(value), seen, deep - 1)
        for kind in type(value).__mro__:
            if kind.__module__.partition(".")[0] not in ("builtins", "torch", "typing", "abc"):
                yield from _inside(attributes, kind, seen, deep)
    if isinstance(value, dict | list | tuple | deque):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _inside(name, each, seen, deep)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(np.prod(value.shape))
    return len(value) if isinstance(value, dict | list | set | tuple | deque) else 0


def _assign(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value
