"""Resolve the text that a user gives into a loss: a registered name, a module's function, or a file's."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kltest.errors import UsageError
from kltest.loss.arguments import Attributes, parsed
from kltest.loss.building import ObjectOf, build
from kltest.loss.calling import Loss, bind
from kltest.loss.frames import failure
from kltest.loss.importing import Imported, ImportFailedError, attribute, import_by_name, import_file, source_of
from kltest.loss.lifting import lift, parse
from kltest.loss.outcome import Call
from kltest.loss.target import LossName, is_dotted, named


def resolve(text: Callable[..., Any] | str, call: Call | None = None, name: str | None = None) -> Loss:
    """Return the loss that a text names, or that a callable is, ready to be called.

    Args:
        text: a registered name (`k3-loss`), `package.module:function` or `path/to/file.py:function`; or the function
            itself, or a Loss, which stays what it is.
        call: placement, credit, coefficient and arguments.
        name: the name of a function in reports; None: its own.

    Raises:
        UsageError: there is no such loss, or a parameter cannot be filled.
        TargetError: it exists and importing it fails.
    """
    call = call or Call()
    if isinstance(text, Loss):
        return text
    if not isinstance(text, str):
        return bind(text, call, name=name)
    target = named(text)
    if target.estimator is not None:
        return bind(target.estimator.function, call, target.estimator.spec.name, spec=target.estimator.spec)
    found, receiver = function_of(target), None
    if found.owner is not None:
        given = {key: value for key, value in call.arguments.items() if key.startswith("self.")}
        attributes = parsed(given).get("self", Attributes())
        receiver = ObjectOf("self", attributes, build(found.owner), found.owner)
        call = replace(call, arguments={key: call.arguments[key] for key in call.arguments if key not in given})
    return bind(found.function, call, text.strip(), receiver=receiver, notes=found.notes)


def function_of(named: LossName) -> Imported:
    """Import the function, or lift it out of its file; if that is impossible, raise what the import raised."""
    module, path, names = named.module, named.path, named.names
    if path is not None and not is_dotted(names):
        listed = ", ".join(_functions(path)) or "it defines none"
        raise UsageError(f"{path.name}: name a function of it, {path.name}:FUNCTION; {listed}")
    try:
        imported = import_by_name(module) if path is None else import_file(path)
        return attribute(imported, names, str(path or module))
    except ImportFailedError as failed:
        cause = failed.__cause__
        assert cause is not None
        source = path or source_of(module)
        if source is None:
            raise failure(f"importing {module} failed, and its source file was not found: it", cause) from cause
        try:
            return lift(source, names, because=cause)
        except UsageError as problem:
            raise UsageError(f"{problem} (importing it failed: {failed})") from cause


def _functions(path: Path) -> Iterator[str]:
    """Yield the functions and methods that a file defines; FailedError if it is no Python."""
    for node in parse(path).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in inner:
            if isinstance(function, ast.FunctionDef) and "__" not in function.name:
                yield function.name if function is node else f"{getattr(node, 'name', '')}.{function.name}"
