"""Recognise functions that are written for JAX, by the packages that their code names.

A function that names JAX and not torch is called with JAX arrays, any other with tensors (or with arrays, if
`kltest.jax_loss` says so).
"""

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

from kltest.loss.callables import without_partials

JAX = frozenset({"jax", "jaxlib"})
TORCH = frozenset({"torch"})
# Depth to which helpers' helpers are read.
DEEPEST = 4


def is_for_jax(function: Callable[..., Any]) -> bool:
    """Return True if the code names JAX and not torch, or if it is an object of JAX's own, as `jax.jit` makes."""
    named = set(_named(function))
    return bool(named & JAX) and not named & TORCH


def _named(function: Any, deep: int = DEEPEST, seen: set[int] | None = None) -> Iterator[str]:
    """Yield the packages, by their first name, that a function and its helpers in the same package name."""
    seen = set() if seen is None else seen
    function = without_partials(function)
    function = getattr(function, "__func__", function)
    if id(function) in seen:
        return
    seen.add(id(function))
    yield _root(type(function).__module__)
    # Not `__module__`: what `jax.vmap` makes has copied that from the function inside.
    yield _root(getattr(function, "__globals__", {}).get("__name__"))
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        function = None if inspect.isclass(function) else inspect.getattr_static(type(function), "__call__", None)
    if not inspect.isfunction(function):
        return
    try:
        closed = inspect.getclosurevars(function).nonlocals
    except ValueError:  # a variable of the closure has no value yet
        closed = {}
    known = {**function.__globals__, **closed}
    for name in _names(function.__code__):
        if name not in known:
            # An attribute, a built-in, or a package that the body imports.
            yield name if name in JAX | TORCH else ""
        elif isinstance(thing := known[name], ModuleType):
            yield _root(thing.__name__)
        else:
            home = _root(getattr(thing, "__module__", None) or type(thing).__module__)
            yield from (home, _root(type(thing).__module__))
            helper = home == _root(function.__module__) or home.startswith("kltest_")
            if deep and helper and home not in JAX | TORCH and callable(thing) and not inspect.isclass(thing):
                yield from _named(thing, deep - 1, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from (name.partition(".")[0] for name in code.co_names)
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _root(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
