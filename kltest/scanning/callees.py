"""Functions of the tree that a call reaches: by name and import, class, constructor, table, decorator or partial."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kltest.scanning.sources import Source
from kltest.scanning.syntax import FUNCTIONS, FunctionNode, chain, names_in, parameters


@dataclass(eq=False)
class Function:
    """A function of the tree; `owner` is the class that it stands in, of which it is a method or within one.

    `settings` are the constants of the tree: those of modules, and the defaults of options in classes of these.
    """

    source: Source
    node: FunctionNode | ast.Module
    owner: str = ""
    is_method: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<module>")

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)

    @property
    def last(self) -> int:
        return getattr(self.node, "end_lineno", None) or self.line

    @property
    def title(self) -> str:
        """Return `Class.method`."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the parameters, without self."""
        return [] if isinstance(self.node, ast.Module) else parameters(self.node)

    def given(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return what a call hands in, by parameter."""
        named = {each.arg: each.value for each in call.keywords if each.arg}
        return dict(zip(self.parameters, call.args, strict=False)) | named

    @cached_property
    def dump(self) -> str:
        """Text that is equal for functions that are written alike."""
        return ast.dump(self.node)

    @cached_property
    def bound(self) -> dict[str, ast.expr]:
        """Values that names are assigned once in it, as far as they could be functions."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).append(node.value)
        return {
            name: values[0]
            for name, values in found.items()
            if len(values) == 1 and isinstance(values[0], ast.Call | ast.Subscript | ast.Attribute)
        }

    @cached_property
    def readers(self) -> dict[str, list[ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr]]:
        """Return the statements with a value by the names that their values read."""
        found: dict[str, list[ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr]] = {}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr) and node.value:
                for name in names_in(node.value):
                    found.setdefault(name, []).append(node)
        return found


class Callees:
    """The functions of the sources by what calls them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.functions = [function for source in sources for function in _functions(source)]
        self.by_name: dict[str, list[Function]] = {}
        self.bases: dict[str, list[str]] = {}
        self.tables: dict[str, dict[object, str]] = {}
        self.getters: dict[str, str] = {}
        self.made: dict[str, ast.expr] = {}
        self._imported: dict[int, dict[str, tuple[str, str]]] = {}
        for function in self.functions:
            if function.name in ("forward", "__call__") and function.is_method:
                self.by_name.setdefault(function.owner, []).append(function)
            self.by_name.setdefault(function.name, []).append(function)
        settings: dict[str, Any] = {}
        for source in sources:
            self._read(source)
            for name, value in _settings(source.tree):
                settings[name] = value if settings.get(name, value) == value else None
        settings = {name: value for name, value in settings.items() if value is not None}
        for function in self.functions:
            function.settings = settings
        for function in self.functions:
            self._read_decorators(function)
        for function in self.functions:
            told = any(table and table in function.source.text for table in self.tables)
            for node in ast.walk(function.node) if told and isinstance(function.node, FUNCTIONS) else ():
                if isinstance(node, ast.Return) and node.value and (table := self._table(node.value)):
                    self.getters[function.name] = table

    def _read(self, source: Source) -> None:
        imported = self._imported[id(source)] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    imported[each.asname or each.name] = ((node.module or "").replace(".", "/"), each.name)
            elif isinstance(node, ast.ClassDef):
                self.bases[node.name] = [chain(base).rsplit(".", 1)[-1] for base in node.bases]
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(node.value, ast.Dict):
                    pairs = zip(node.value.keys, node.value.values, strict=True)
                    table: dict[object, str] = {
                        key.value: chain(value).rsplit(".", 1)[-1]
                        for key, value in pairs
                        if isinstance(key, ast.Constant)
                    }
                    if table and all(name in self.by_name for name in table.values()):
                        self.tables[chain(target).rsplit(".", 1)[-1]] = table
                elif isinstance(target, ast.Attribute) and isinstance(node.value, ast.Call | ast.Subscript):
                    self.made[target.attr] = node.value

    def _read_decorators(self, function: Function) -> None:
        """`@register("k3")` puts a function into the table that `register` writes to, or that it is a method of."""
        for each in getattr(function.node, "decorator_list", ()):
            called = each.func if isinstance(each, ast.Call) else each
            given = each.args[0] if isinstance(each, ast.Call) and each.args else None
            key = given.value if isinstance(given, ast.Constant) else function.name
            *holder, last = chain(called).split(".")
            written = holder[-1:] or [
                chain(target.value)
                for registrar in self.by_name.get(last, [])
                for node in ast.walk(registrar.node)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Subscript)
            ]
            if written and "regist" in last:
                self.tables.setdefault(written[0].rsplit(".", 1)[-1], {})[key] = function.name

    def _table(self, node: ast.expr) -> str:
        """Return the name of the table that an expression looks something up in."""
        if isinstance(node, ast.Call):
            called = chain(node.func)
            if called.endswith(".get") and node.args:
                node = node.func.value  # type: ignore[attr-defined]
            else:
                return self.getters.get(called.rsplit(".", 1)[-1], "") if node.args else ""
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return ""
        name = chain(node).rsplit(".", 1)[-1]
        return name if name in self.tables else ""

    def looked_up(self, called: ast.expr, function: Function) -> tuple[ast.expr, dict[object, str]] | None:
        """Return the key, and the names of functions by key, if a table says what is called."""
        if not self.tables:
            return None
        if isinstance(called, ast.Name) and called.id not in self.by_name:
            called = function.bound.get(called.id, called)
        elif isinstance(called, ast.Attribute) and chain(called).startswith("self."):
            called = self.made.get(called.attr, called)
        if not (table := self._table(called)):
            return None
        return called.args[0] if isinstance(called, ast.Call) else called.slice, self.tables[table]  # type: ignore[attr-defined]

    def constructed(self, called: ast.expr, function: Function) -> ast.Call | None:
        """Return the call that made what is called, as `nn.KLDivLoss(…)`."""
        made: ast.expr | None = called if isinstance(called, ast.Call) else None
        if isinstance(called, ast.Name) and called.id not in self.by_name:
            made = function.bound.get(called.id)
        elif isinstance(called, ast.Attribute) and chain(called).startswith("self."):
            made = self.made.get(called.attr)
        return made if isinstance(made, ast.Call) else None

    def callees(self, called: ast.expr, function: Function) -> list[Function]:
        """Return the functions that a call may reach, the likeliest first."""
        if found := self.looked_up(called, function):
            return [each for name in found[1].values() for each in self.by_name.get(name, [])[:1]]
        if isinstance(called, ast.Call):  # Class(…)(x), Class.apply(x)
            called = called.func
        *holder, name = chain(called).split(".")
        if isinstance(called, ast.Attribute):
            name = called.attr
            super_called = isinstance(called.value, ast.Call) and chain(called.value.func) == "super"
            if holder[:1] in (["self"], ["cls"]) or super_called:
                owners = self.bases.get(function.owner, []) if super_called else [function.owner]
                if len(holder) < 2 and (method := next(self._methods(owners, name, function.source), None)):
                    return [method]
                made = self.made.get(name)
                if isinstance(made, ast.Call) and chain(made.func).rsplit(".", 1)[-1] in self.bases:
                    name = chain(made.func).rsplit(".", 1)[-1]
            elif holder and holder[-1] in self.bases:
                return list(self._methods([holder[-1]], name, function.source))[:1]
        # A bare name reaches no method, but a class by its `forward`.
        bare = isinstance(called, ast.Name)
        return [
            each for each in self.called(name, function.source) if not (bare and each.is_method and each.name == name)
        ]

    def _methods(self, owners: Iterable[str], name: str, source: Source) -> Iterator[Function]:
        """Yield the methods of that name, of the classes and those that they inherit from."""
        seen: list[str] = []
        waiting = list(owners)
        while waiting:
            owner = waiting.pop(0)
            if owner not in seen:
                seen.append(owner)
                own = [each for each in self.by_name.get(name, []) if each.is_method and each.owner == owner]
                yield from sorted(own, key=lambda each: each.source is not source)
                waiting += self.bases.get(owner, [])

    def called(self, name: str, source: Source) -> list[Function]:
        """Return the functions of that name: those of the same file, of the module it is imported from, or all."""
        module, name = self._imported[id(source)].get(name, ("", name))
        found = self.by_name.get(name, [])
        same = [function for function in found if function.source is source]
        there = [function for function in found if module and f"/{module}." in f"/{function.source.path}."]
        return same or there or found


def _settings(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the constants of a module, and the defaults of the fields of its classes of options."""
    for node in tree.body:
        options = isinstance(node, ast.ClassDef) and re.search("Config|Arg|Option|Param|Setting", node.name)
        for each in node.body if isinstance(node, ast.ClassDef) and options else [node]:
            match each:
                case ast.AnnAssign(ast.Name(name), _, value) | ast.Assign([ast.Name(name)], value):
                    given = {keyword.arg: keyword.value for keyword in getattr(value, "keywords", ())}
                    value = given.get("default", value)  # of field(default=…)
                    with suppress(ValueError, TypeError, SyntaxError):
                        if (options or name.isupper()) and value is not None:
                            yield name, ast.literal_eval(value)


def _functions(source: Source) -> Iterator[Function]:
    """Yield the functions of a file, with methods and inner functions, and its module-level statements last."""

    def below(node: ast.AST, owner: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                yield Function(source, child, owner, isinstance(node, ast.ClassDef))
                yield from below(child, owner)
            elif isinstance(child, ast.ClassDef):
                yield from below(child, child.name)
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from below(child, owner)

    yield from below(source.tree, "")
    yield Function(source, source.tree)
