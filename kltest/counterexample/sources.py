"""Definition of a loss for a program without kltest: an import, or the lines of the loss itself."""

import ast
import builtins
import copy
import inspect
import json
import keyword
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kltest.loss.importing import package_of
from kltest.loss.importing import source_of as source_of_module
from kltest.loss.lifting import compiled
from kltest.loss.reach import MISSING, cells, content, names_read
from kltest.loss.target import named as target_named

# Modules that exist only while kltest runs, or that the program must not need.
OURS = frozenset({"kltest", "__main__", "__mp_main__"})
FROM_FILE, LIFTED = "kltest_target_", "kltest_lifted_"
FUTURE = "from __future__ import annotations"
UNREADABLE = "its source cannot be read by itself"


class NoSourceError(Exception):
    """Raised for a loss that a few lines cannot define; the message says why, as half a sentence."""


class Definition(NamedTuple):
    """Lines that define or import a callable, and the name that it has after them."""

    lines: tuple[str, ...]
    name: str


def source_of(function: Callable[..., Any], target: str, taken: frozenset[str]) -> Definition:
    """Return an import if the loss can be imported, else its lines with the helpers and constants that it uses.

    Args:
        function: The loss.
        target: Its name as the user gave it.
        taken: Names that the program uses itself.

    Raises:
        NoSourceError: If neither is possible.
    """
    file = re.fullmatch(r"(?P<path>.+\.py):(?P<names>[\w.]+)", target.strip())
    if file is not None and _module_name(function).startswith(FROM_FILE):
        path = Path(file["path"])
        found = _imported(path.stem, file["names"], taken)
        return Definition(("import sys", f"sys.path.insert(0, {str(path.parent)!r})", *found.lines), found.name)
    if address := _address(function):
        return _imported(*address, taken)
    if not inspect.isroutine(function) and not isinstance(function, partial) and (address := _address(type(function))):
        made = _imported(*address, taken)
        return Definition(made.lines, f"{made.name}()")
    return _inlined(function, taken)


def _imported(module: str, names: str, taken: frozenset[str]) -> Definition:
    head, _, rest = names.partition(".")
    alias = f"graded_{head}" if head in taken else head
    line = f"from {module} import {head}" + (f" as {alias}" if alias != head else "")
    return Definition((line,), f"{alias}.{rest}" if rest else alias)


def imported(function: Callable[..., Any], target: str, folder: Path, taken: frozenset[str]) -> Definition:
    """Return an import of the loss by the name that its users have for it, for a file in a folder.

    A loss in a file is imported with `load(ROOT, MODULE)`: the path of the folder above its package, as seen from the
    folder, and the dotted name there. One whose file cannot be imported is lifted: `Lifted(PATH)`.

    Raises:
        NoSourceError: It belongs to kltest, or importing its module failed and its file is not known.
    """
    named = target_named(target)
    if named.estimator is not None or named.module.split(".")[0] in OURS:
        raise NoSourceError("it is part of kltest, which the file must not need")
    if _module_name(inspect.unwrap(function)).startswith(LIFTED):
        if (file := named.path or source_of_module(named.module)) is None:
            raise NoSourceError("importing its module fails here, and its file was not found")
        head, dot, rest = named.names.partition(".")
        path = Path(os.path.relpath(file, folder.resolve())).as_posix()
        alias = re.sub(r"\W+", "_", f"lifted_{file.stem}")
        return Definition((f"{alias} = Lifted({json.dumps(path)})",), f'{alias}["{head}"]{dot}{rest}')
    if named.path is None:
        module = alias = named.module
        line = "import {module} as {alias}"
    else:
        root, module = package_of(named.path)
        path = os.path.relpath(root, folder.resolve())
        line = f'{{alias}} = load({json.dumps(Path(path).as_posix())}, "{{module}}")'
        alias = f"{path}/{module}" if path != "." else module
    alias = re.sub(r"\W+", "_", alias).strip("_")
    if alias in taken or keyword.iskeyword(alias) or not alias.isidentifier():
        alias = f"graded_{alias}"
    return Definition((line.format(module=module, alias=alias),), f"{alias}.{named.names}")


def _module_name(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or getattr(type(thing), "__module__", ""))


def _address(thing: Any) -> tuple[str, str] | None:
    """Module and name from which a thing can be imported, None if it cannot."""
    module, name = _module_name(thing), getattr(thing, "__qualname__", None)
    home = sys.modules.get(module)
    if home is None or not name or module.split(".")[0] in OURS or module.startswith((FROM_FILE, LIFTED)):
        return None
    found: Any = home
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is thing else None


def _inlined(function: Callable[..., Any], taken: frozenset[str]) -> Definition:
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        raise NoSourceError("it is an object that was made while the program ran")
    lines = list(_definitions(function, set()))
    name = "graded" if function.__name__ == "<lambda>" else function.__name__
    defined = {match[1] for line in lines if (match := re.match(r"(?:def|class) (\w+)|(\w+) = ", line)) and match[1]}
    if clash := defined & taken:
        raise NoSourceError(f"a name in its source, {sorted(clash)[0]}, is one that the program needs")
    imports = sorted({line for line in lines if line.startswith(("import ", "from "))})
    rest = (part for line in lines if line not in imports for part in ([""] * line.startswith("def ") + [line]))
    return Definition((*imports, *rest), name)


def _definitions(function: Any, seen: set[str]) -> Iterator[str]:
    """Lines of everything that a function uses from its module, then its own."""
    names, lines = _parsed(function)
    closed = {name: content(cell) for name, cell in cells(function).items()}
    if MISSING in closed.values():
        raise NoSourceError("a variable around it has no value")
    known = {**function.__globals__, **closed}
    for name in sorted(names, key=lambda name: (name not in closed, name)):
        if name in seen or name == "__name__" or (name not in known and hasattr(builtins, name)):
            # The body of a class reads `__name__`.
            continue
        if name not in known:
            raise NoSourceError(f"it uses {name}, which is not defined")
        seen.add(name)
        yield from _definition(name, known[name], seen)
    yield from lines


def _parsed(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names that a function reads, and the lines of its definition without docstring and decorator of kltest."""
    try:
        text = tuple(inspect.findsource(function)[0])
    except (OSError, TypeError):
        raise NoSourceError(UNREADABLE) from None
    return _read(text, function.__code__.co_firstlineno, is_lambda=function.__name__ == "<lambda>")


@lru_cache(maxsize=1024)
def _read(text: tuple[str, ...], first: int, *, is_lambda: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the same for the function, or lambda, that begins in line `first` of a file's text."""
    kind = ast.Lambda if is_lambda else ast.FunctionDef
    nodes = [node for node in _functions("".join(text)) if isinstance(node, kind)]
    found = [copy.deepcopy(each) for each in nodes if first in _beginnings(each)]
    if len(found) != 1:
        raise NoSourceError("it is one of several lambdas on a line" if found else UNREADABLE)
    node: Any = found[0]
    if isinstance(node, ast.Lambda):
        lines = [f"graded = {ast.unparse(node)}"]
        (node,) = ast.parse(lines[0]).body
    else:
        decorators = map(ast.unparse, node.decorator_list)
        if other := next((one for one in decorators if not one.startswith("register(")), None):
            raise NoSourceError(f"it is decorated with {other}")
        node.decorator_list = []
        start, doc = node.lineno - 1, node.body[0]
        lines = list(text[start : node.end_lineno])
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            del lines[doc.lineno - 1 - start : (doc.end_lineno or 0) - start]
        lines = textwrap.dedent("".join(lines)).splitlines()
    if any(getattr(part, "annotation", None) or getattr(part, "returns", None) for part in ast.walk(node)):
        # With this, the names in annotations need no definition.
        lines.insert(0, FUTURE)
    try:
        return names_read(compiled(node, Path("<loss>"))), tuple(lines)
    except SyntaxError:
        # It changes a variable of the function around it.
        raise NoSourceError(UNREADABLE) from None


@lru_cache(maxsize=32)
def _functions(text: str) -> list[ast.Lambda | ast.FunctionDef]:
    """Return the functions and lambdas in a file's text, an empty list if it cannot be parsed."""
    with suppress(SyntaxError):
        return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda | ast.FunctionDef)]
    return []


def _beginnings(node: ast.Lambda | ast.FunctionDef) -> set[int]:
    """The lines that a function, or one of its decorators, begins in."""
    return {node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))}


def _definition(name: str, value: Any, seen: set[str]) -> Iterator[str]:
    if isinstance(value, ModuleType):
        if value.__name__.split(".")[0] in OURS:
            raise NoSourceError(f"it uses the module {value.__name__}")
        yield f"import {name}" if name == value.__name__ else f"import {value.__name__} as {name}"
    elif address := _address(value):
        module, known_as = address
        if "." in known_as:
            raise NoSourceError(f"it uses {name}, which cannot be imported from {module} by name")
        yield f"from {module} import {known_as}" + (f" as {name}" if name != known_as else "")
    elif inspect.isfunction(value) and value.__name__ == name:
        yield from _definitions(value, seen)
    elif is_literal(value):
        yield f"{name} = {value!r}"
    else:
        raise NoSourceError(f"it uses {name}, a {type(value).__name__} that cannot be written down")


def is_literal(value: Any) -> bool:
    """True if the repr of a value evaluates to that value."""
    try:
        again = ast.literal_eval(repr(value))
        return type(again) is type(value) and bool(again == value)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        return False
