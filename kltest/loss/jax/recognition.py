"""Whether a function is written for JAX or for torch, by what its code names.

A function that names JAX and not torch is called with JAX arrays; one that names both, or neither, is called with
tensors first. So a loss for torch is never given anything else, as long as it runs.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, ModuleType
from typing import Any

JAX = frozenset({"jax", "jaxlib"})
TORCH = frozenset({"torch"})
# A helper's helper's helper says enough.
DEEPEST = 4


def is_for_jax(function: Callable[..., Any]) -> bool:
    """Whether the code names JAX and not torch, or is an object of JAX's own, as what `jax.jit` makes."""
    named = set(_named(function))
    return bool(named & JAX) and not named & TORCH


def may_be_for_jax(function: Callable[..., Any]) -> bool:
    """Whether it makes sense to try JAX arrays on a function that failed with tensors."""
    if not JAX & sys.modules.keys():
        return False
    beside = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__globals__", {}).values()
    return bool(
        JAX & {*_named(function), *(_root(thing.__name__) for thing in beside if isinstance(thing, ModuleType))}
    )


def _named(function: Any, deep: int = DEEPEST, seen: set[int] | None = None) -> Iterator[str]:
    """The packages, by their first name, of what a function and its helpers name."""
    seen = set() if seen is None else seen
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if id(function) in seen:
        return
    seen.add(id(function))
    yield _root(type(function).__module__)
    yield _root(getattr(function, "__globals__", {}).get("__name__"))
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        function = None if inspect.isclass(function) else inspect.getattr_static(type(function), "__call__", None)
    if not inspect.isfunction(function):
        return
    for annotation in getattr(function, "__annotations__", {}).values():
        yield from _of_annotation(annotation, function.__globals__)
    known = {**function.__globals__, **_closed_over(function)}
    for name in _names(function.__code__):
        yield from _of_thing(known.get(name), function, deep, seen) if name in known else _of_import(name)


def _of_thing(thing: Any, user: Any, deep: int, seen: set[int]) -> Iterator[str]:
    if isinstance(thing, ModuleType):
        yield _root(thing.__name__)
        return
    home = _root(getattr(thing, "__module__", None) or type(thing).__module__)
    yield home
    yield _root(type(thing).__module__)
    if deep and callable(thing) and home not in JAX | TORCH and not inspect.isclass(thing):
        same_place = home == _root(user.__module__)
        if same_place or home.startswith("kltest_"):
            yield from _named(thing, deep - 1, seen)


def _of_import(name: str) -> Iterator[str]:
    """A name that no module-level object has is an attribute, a built-in, or a package that the body imports."""
    if not hasattr(builtins, name) and name in JAX | TORCH:
        yield name


def _of_annotation(annotation: Any, known: dict[str, Any]) -> Iterator[str]:
    text = annotation if isinstance(annotation, str) else ""
    head = text.partition(".")[0].partition("[")[0].strip()
    thing = known.get(head) if text else annotation
    if isinstance(thing, ModuleType):
        yield _root(thing.__name__)
    elif thing is not None:
        yield _root(getattr(thing, "__module__", None))


def _closed_over(function: Any) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable of the closure that has no value yet
            continue
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from (name.partition(".")[0] for name in code.co_names)
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _root(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
