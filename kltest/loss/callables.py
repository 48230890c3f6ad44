"""Parameters of the callables that can be called with a rollout, and the reason why others are refused."""

import ast
import inspect
import reprlib
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from kltest.errors import UsageError
from kltest.loss.frames import failure, raised_as


def contents(thing: Any) -> Mapping[str, Any]:
    """Return the entries of a mapping, the attributes of another object."""
    return thing if isinstance(thing, Mapping) else getattr(thing, "__dict__", {})


def described(function: Any, name: str) -> tuple[Callable[..., Any], inspect.Signature]:
    """Return something to call and its signature: classes that need nothing are built, modules called by `forward`.

    Raises UsageError for anything that cannot be called, or whose parameters have no names.
    """
    if not callable(function):
        what = name if name != type(function).__qualname__ else f"{reprlib.repr(function)}, given as the loss,"
        raise UsageError(f"{what} is {kind_of(function)} and cannot be called; name a function")
    if inspect.isclass(function):
        function = _instance(function, name)
    described_by = function.forward if isinstance(function, torch.nn.Module) else function
    inner = inner_of(function)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner) or inspect.isgeneratorfunction(inner):
        kind = "a generator" if inspect.isgeneratorfunction(inner) else "an async function"
        raise UsageError(f"{name} is {kind}; a loss is a plain function that returns its value")
    try:
        return function, inspect.signature(described_by)
    except (ValueError, TypeError):
        raise UsageError(
            f"{name} is built in and does not say what its parameters are called; "
            "wrap it in a Python function: def loss(logp, ref_logp): return …"
        ) from None


def _instance(kind: type, name: str) -> Any:
    methods = [key for key, value in vars(kind).items() if inspect.isroutine(value) and not key.startswith("_")]
    advice = f"Name one of its methods, {name}.METHOD ({', '.join(methods) or 'it has no public ones'})"
    if not any("__call__" in vars(base) for base in kind.__mro__ if base is not object):
        raise UsageError(f"{name} is a class whose instances cannot be called. {advice}")
    try:
        needed = [parameter.name for parameter in required(kind)]
    except (ValueError, TypeError):
        needed = ["…"]
    if needed:
        raise UsageError(
            f"{name} is a class that has to be built with {', '.join(needed)}. {advice}, and give what it reads of "
            "its object with --arg self.ATTRIBUTE=VALUE; or point kltest at a function that builds and calls it"
        )
    with raised_as(lambda error: failure(f"building {name}()", error, source_file(kind))):
        return kind()


def required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that need an argument."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def inner_of(function: Any) -> Any:
    """Return the function that runs when a callable is called, without partials and wrappers."""
    inner = without_partials(function.forward if isinstance(function, torch.nn.Module) else function)
    if not (inspect.isroutine(inner) or inspect.isclass(inner)):
        inner = type(inner).__call__
    return inspect.unwrap(inner)


def definition_of(function: Any) -> ast.AST | None:
    """Return the syntax tree of the function that runs when a callable is called, None if its source is not there."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inner_of(function)))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


def without_partials(function: Any) -> Any:
    """Return the function inside of partials."""
    while isinstance(function, partial):
        function = function.func
    return function


def source_file(function: Any) -> str | None:
    """Return the file that defines a callable, None if there is none."""
    with suppress(TypeError, ValueError):
        return inspect.getsourcefile(inner_of(function))
    return None


def first_line(function: Any) -> tuple[str, int] | None:
    """Return the file and the line at which a callable's definition begins, None if there is none."""
    code = getattr(inner_of(function), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code and not code.co_filename.startswith("<") else None


def name_of(function: Any) -> str:
    """Return the name of a callable: of a partial that of its function, of an object that of its class."""
    function = without_partials(function)
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) and name else type(function).__qualname__


def kind_of(thing: Any) -> str:
    """Return the type of a thing with its article: a dict, an int."""
    kind = type(thing).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
