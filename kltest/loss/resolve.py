"""Resolve the text that a user gives into a loss: a registered name, a module's function, or a file's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kltest.errors import UsageError
from kltest.loss.arguments import Stub
from kltest.loss.calling import Loss, bind
from kltest.loss.frames import failure
from kltest.loss.importing import Found, ImportFailedError, attribute, import_by_name, import_file, source_of
from kltest.loss.lifting import lift
from kltest.loss.names import is_dotted, named
from kltest.loss.outcome import Call
from kltest.loss.syntax import parse


def resolve(text: str, call: Call | None = None) -> Loss:
    """Return the loss that a text names, ready to be called.

    Args:
        text: a registered name (`k3-loss`), `package.module:function` or `path/to/file.py:function`.
        call: placement, credit, coefficient and arguments.

    Raises:
        UsageError: there is no such loss, or a parameter cannot be filled.
        TargetError: it exists and importing it fails.
    """
    call = call or Call()
    found = named(text)
    if found.estimator is not None:
        return bind(found.estimator.function, call, found.estimator.spec.name, spec=found.estimator.spec)
    if found.path is not None:
        return _ready(text.strip(), _in_file(found.path, found.names), call)
    return _ready(text.strip(), _in_module(found.module, found.names), call)


def _ready(text: str, found: Found, call: Call) -> Loss:
    receiver = None
    if found.owner is not None:
        attributes = {key[5:]: value for key, value in call.arguments.items() if key.startswith("self.")}
        receiver = Stub("self", attributes, found.owner)
        call = replace(call, arguments={k: v for k, v in call.arguments.items() if not k.startswith("self.")})
    return bind(found.function, call, text, receiver=receiver, notes=found.notes)


def _in_module(module: str, names: str) -> Found:
    try:
        return attribute(import_by_name(module), names, module)
    except ImportFailedError as error:
        return _lifted(source_of(module), names, error, f"importing {module}")


def _in_file(path: Path, names: str) -> Found:
    if not is_dotted(names):
        listed = ", ".join(_functions(path)) or "it defines none"
        raise UsageError(f"{path.name}: name a function of it, {path.name}:FUNCTION; {listed}")
    try:
        return attribute(import_file(path), names, str(path))
    except ImportFailedError as error:
        return _lifted(path, names, error, f"importing {path.name}")


def _lifted(path: Path | None, names: str, error: ImportFailedError, what: str) -> Found:
    """Lift the function out of its file; if that is impossible, raise what the import raised."""
    assert error.__cause__ is not None
    if path is None:
        raise failure(f"{what} failed, and its source file was not found: it", error.__cause__) from error.__cause__
    try:
        return lift(path, names, because=error.__cause__)
    except UsageError as problem:
        raise UsageError(f"{problem} (importing it failed: {error})") from error.__cause__


def _functions(path: Path) -> Iterator[str]:
    """Yield the functions and methods that a file defines; FailedError if it is no Python."""
    for node in parse(path).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in inner:
            if isinstance(function, ast.FunctionDef) and "__" not in function.name:
                yield function.name if function is node else f"{getattr(node, 'name', '')}.{function.name}"
