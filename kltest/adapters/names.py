"""The names that a library's function knows for a parameter, read out of its source: what it compares it with."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def names_known(module: str, function: str, parameter: str) -> tuple[str, ...]:
    """The strings that `function` (or `Class.method`) of a module compares a parameter with, in their order.

    Followed are comparisons, `match`, keys of module-level dictionaries, local names for the same thing, and functions
    of the module that it is handed on to. Where it is asked whether the parameter ends with something, as in
    `name.endswith("+")`, each name is given with that ending as well. Nothing is imported; empty where there is no such
    module or function.
    """
    from kltest.errors import KltestError
    from kltest.loss.importing import source_of
    from kltest.loss.syntax import parse

    path = source_of(module)
    if path is None:
        return ()
    try:
        reader = _Reader(parse(path))
    except KltestError:
        return ()
    reader.read(function, parameter)
    names = [name for name in reader.names if name not in reader.endings]
    plain = [name for name in names if not name.endswith(tuple(reader.endings) or ("\0",))]
    ended = [name + ending for ending in reader.endings for name in plain]
    return tuple(dict.fromkeys([*names, *ended]))


class _Reader:
    """Collects what the functions of one file say of a parameter."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = {name: node for statement in tree.body for name, node in _functions(statement)}
        self.tables = {
            target.id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        self.names: list[str] = []
        self.endings: list[str] = []
        self._read: set[tuple[str, str]] = set()

    def read(self, function: str, parameter: str) -> None:
        node = self.functions.get(function)
        if node is None or (function, parameter) in self._read:
            return
        self._read.add((function, parameter))
        called = _aliases(node, parameter)
        for inner in sorted(
            ast.walk(node), key=lambda inner: (getattr(inner, "lineno", 0), getattr(inner, "col_offset", 0))
        ):
            if isinstance(inner, ast.Compare):
                sides = [inner.left, *inner.comparators]
                if any(_is(side, called) for side in sides):
                    self._take(side for side in sides if not _is(side, called))
            elif isinstance(inner, ast.Match) and _is(inner.subject, called):
                self._take(part.value for part in ast.walk(inner) if isinstance(part, ast.MatchValue))
            elif isinstance(inner, ast.Subscript) and _is(inner.slice, called):
                self._take([inner.value])
            elif isinstance(inner, ast.Call):
                self._call(inner, called)

    def _call(self, call: ast.Call, called: set[str]) -> None:
        if isinstance(call.func, ast.Attribute) and _is(call.func.value, called):
            if call.func.attr in ("endswith", "removesuffix"):
                self.endings += [text for text in _strings(call.args[0]) if text not in self.endings]
        elif (
            isinstance(call.func, ast.Attribute) and call.func.attr == "get" and call.args and _is(call.args[0], called)
        ):
            self._take([call.func.value])
        elif isinstance(call.func, ast.Name) and (inner := self.functions.get(call.func.id)):
            parameters = [each.arg for each in (*inner.args.posonlyargs, *inner.args.args)]
            for name, value in zip(parameters, call.args, strict=False):
                if _is(value, called):
                    self.read(call.func.id, name)
            for keyword in call.keywords:
                if keyword.arg and _is(keyword.value, called):
                    self.read(call.func.id, keyword.arg)

    def _take(self, nodes: Iterator[ast.expr] | list[ast.expr]) -> None:
        for node in nodes:
            node = self.tables.get(node.id, node) if isinstance(node, ast.Name) else node
            self.names += [text for text in _strings(node) if text not in self.names]


def _functions(statement: ast.stmt) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    if isinstance(statement, FUNCTIONS):
        yield statement.name, statement
    elif isinstance(statement, ast.ClassDef):
        yield from ((f"{statement.name}.{name}", node) for inner in statement.body for name, node in _functions(inner))


def _aliases(function: ast.AST, parameter: str) -> set[str]:
    """The parameter, and local names that are made of nothing but it."""
    found = {parameter}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            read = {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
            if read and read <= found:
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _is(node: ast.expr, called: set[str]) -> bool:
    """Whether an expression is the parameter, an attribute of its name, or a string made of it (`name.lower()`)."""
    if isinstance(node, ast.Name):
        return node.id in called
    if isinstance(node, ast.Attribute):
        return node.attr in called
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("lower", "strip", "removesuffix") and _is(node.func.value, called)
    return isinstance(node, ast.Subscript) and _is(node.value, called)


def _strings(node: ast.expr) -> list[str]:
    """The strings of a constant, of a tuple, list or set of them, or of a dictionary's keys."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Dict):
        return [text for key in node.keys if key is not None for text in _strings(key)]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [text for each in node.elts for text in _strings(each)]
    return []
