"""Names that a function reads and functions that it calls by them: what a loss may depend on, found without a call."""

import dis
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from kltest.loss.callables import without_partials

JAX = frozenset({"jax", "jaxlib"})
TORCH = frozenset({"torch"})
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_WRITTEN = ("STORE_GLOBAL", "IMPORT_NAME")
# Depth to which helpers' helpers are read for the packages that they name.
DEEPEST = 4


class MISSING:
    """Stands for a name that has no value yet; a class, since copies of it are itself."""


def reached(
    function: Any, is_helper: Callable[[Any, FunctionType], bool], deepest: int | None = None
) -> Iterator[FunctionType]:
    """Yield the functions that run when a callable is called: its own, those inside wrappers, and helpers.

    Args:
        function: A callable of any kind.
        is_helper: Tells if a value that a function reads by name is a helper of it.
        deepest: Depth to which helpers' helpers are followed, None for any.
    """
    waiting: list[tuple[Any, int]] = [(function, 0)]
    seen: set[FunctionType] = set()
    while waiting:
        value, depth = waiting.pop()
        value = without_partials(value.forward if isinstance(value, torch.nn.Module) else value)
        value = value.__func__ if isinstance(value, MethodType) else value
        if inside := getattr(value, "__wrapped__", None):
            waiting.append((inside, depth))
        elif not isinstance(value, FunctionType | type):
            value = type(value).__call__ if callable(value) else None
        if not isinstance(value, FunctionType) or value in seen:
            continue
        seen.add(value)
        yield value
        if deepest is None or depth < deepest:
            helpers = [each for each in values_read(value).values() if is_helper(each, value)]
            waiting += [(each, depth + 1) for each in helpers]


def values_read(function: FunctionType) -> dict[str, Any]:
    """Return the value of each name of its module or closure that a function reads, MISSING where there is none.

    Of a module that is not installed, what the function names of it, as "module.name", is read as well.
    """
    found = {name: _global(function, name) for name in names_read(function.__code__, _WRITTEN)}
    found |= {name: content(cell) for name, cell in cells(function).items()}
    modules = {name: vars(one) for name, one in found.items() if isinstance(one, ModuleType) and is_own(one.__name__)}
    named = all_names(function.__code__) if modules else ()
    return found | {
        f"{module}.{name}": space[name] for module, space in modules.items() for name in named if name in space
    }


def is_own(module: str | None) -> bool:
    """Return True for a module that belongs to no installed package and not to Python or kltest."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and _first(module) != "kltest" and not any(map(Path(file).is_relative_to, _installed()))


@lru_cache
def _installed() -> list[str]:
    return [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def all_names(code: CodeType) -> set[str]:
    """Return the names of attributes and of its module that code has, also in the functions inside it."""
    return set(code.co_names).union(*(all_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def cells(function: FunctionType) -> dict[str, CellType]:
    """Return the variables of a function's closure."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def content(cell: CellType) -> Any:
    """Return the value of a closure's variable, MISSING before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _global(function: FunctionType, name: str) -> Any:
    try:
        return function.__globals__[name]  # which lifts it, if the function was lifted
    except (KeyError, NameError):
        return MISSING


@lru_cache(maxsize=4096)
def names_read(code: CodeType, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the module-level names that code reads when it runs or, of functions in it, when they are called.

    Args:
        code: The code.
        more: Names of further instructions that count.
    """
    found = [each.argval for each in dis.get_instructions(code) if each.opname in (*_READS, *more)]
    inner = [names_read(constant, more) for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys(chain([name.partition(".")[0] for name in found], *inner)))


def packages_named(function: Any) -> set[str]:
    """Return the packages, by their first name, that a callable and its helpers in the same package name."""
    found = {_package(type(without_partials(function)))}
    for each in reached(function, _in_same_package, DEEPEST):
        # Not `__module__`: what `jax.vmap` makes has copied that from the function inside.
        found.add(_first(each.__globals__.get("__name__")))
        for name, value in values_read(each).items():
            # An attribute or a built-in, else a package that the body imports.
            found |= {name} if value is MISSING else {_package(value), _package(type(value))}
    return found


def is_for_jax(function: Callable[..., Any]) -> bool:
    """Return True if the code names JAX and not torch, or if it is an object of JAX's own, as `jax.jit` makes.

    Such a function is called with JAX arrays, any other with tensors, unless `kltest.jax_loss` says so.
    """
    named = packages_named(function)
    return bool(named & JAX) and not named & TORCH


def _in_same_package(value: Any, function: FunctionType) -> bool:
    home = _package(value)
    near = home == _package(function) or home.startswith("kltest_")
    return near and home not in JAX | TORCH and callable(value) and not isinstance(value, type)


def _package(value: Any) -> str:
    return _first(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None))


def _first(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
