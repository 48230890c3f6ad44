"""Lifting: a function out of a file that cannot be imported, with the helpers, constants and imports that it uses.

The file is parsed, not executed. Of its module-level statements, those run that the function needs, directly or
through what it uses; each import is tried by itself, and follows into the package's other files if it fails.
Annotations are not evaluated. What cannot be had is replaced by an object that says so when it is used.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kltest.loss.frames import describe, failure
from kltest.loss.importing import Found, attribute, package_of, searching, source_of
from kltest.loss.syntax import compiled, is_plain, is_table, names_bound, names_read, parse, root

_PREFIX = "kltest_lifted_"


def lift(path: Path, names: str, *, because: BaseException) -> Found:
    """Take the function (or `Class.method`) of that name out of a file, without importing the file.

    `because` is what importing it raised. Raises UsageError if the file has no such name, FailedError if the
    statements that it needs fail.
    """
    lifter = _Lifter(path)
    head = names.split(".")[0]
    if not lifter.knows(head):
        holder = SimpleNamespace(**dict.fromkeys(lifter.units))
        attribute(holder, head, str(path))
    thing = lifter.get(head)
    if isinstance(thing, _Absent):
        text = f"{head} could not be lifted out of {path.name} ({vars(thing)['_why']}), and importing the file"
        raise failure(text, because, str(path)) from because
    found = attribute(SimpleNamespace(**{head: thing}), names, str(path))
    note = f"{names} was lifted out of {path.name} by its syntax tree, since importing the file failed: "
    return Found(found.function, found.owner, (note + describe(because), *lifter.all_notes()))


class MissingNameError(NameError):
    """Lifted code used something that could not be had."""


class _Absent:
    """Stands for a module-level name that could not be had; any use of it raises MissingNameError."""

    def __init__(self, name: str, why: str) -> None:
        vars(self).update(_name=name, _why=why)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise MissingNameError(f"{vars(self)['_name']} is not available to the lifted function: {vars(self)['_why']}")

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)
        return self._refuse()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __enter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __neg__ = __float__ = __int__ = __instancecheck__ = __mro_entries__ = _refuse


class _LiftedModule:
    """Another file of the package, as `from . import utils` names it: its names are lifted when they are asked for."""

    def __init__(self, lifter: _Lifter) -> None:
        self._lifter = lifter

    def __getattr__(self, name: str) -> Any:
        if self._lifter.knows(name):
            thing = self._lifter.get(name)
            if isinstance(thing, _Absent):
                raise ImportError(f"{self._lifter.path.name} has no usable {name}: {vars(thing)['_why']}")
            return thing
        submodule = self._lifter.path.parent / f"{name}.py"
        if self._lifter.path.name == "__init__.py" and submodule.is_file():
            return _LiftedModule(self._lifter._sibling(submodule))
        raise AttributeError(f"{self._lifter.path} defines no {name!r}")


class _Lifter:
    """The module-level names of one file, each executed when it is first needed."""

    def __init__(self, path: Path, family: dict[Path, _Lifter] | None = None) -> None:
        self.path = path
        self.root, name = package_of(path)
        self.family = {} if family is None else family
        self.family[path] = self
        self.notes: list[str] = []
        tree = parse(path)
        self.units: dict[str, list[ast.stmt]] = {}
        self.stars: list[ast.ImportFrom] = []
        for statement in tree.body:
            self._index(statement)
        for statement in tree.body:
            self._index_registration(statement)
        own = {**vars(builtins), "__import__": self._import_or_lift}
        module = ModuleType(_PREFIX + name)
        sys.modules[module.__name__] = module  # dataclasses look their module up there
        self.namespace: dict[str, Any] = vars(module)
        self.namespace.update(__file__=str(path), __builtins__=own)
        self._done: set[int] = set()
        self._asked: set[str] = set()

    def knows(self, name: str) -> bool:
        return name in self.units

    def all_notes(self) -> list[str]:
        """Sentences on what was left out, in this file and in those that it led to."""
        return [note for lifter in self.family.values() for note in lifter.notes]

    def get(self, name: str) -> Any:
        """The value of a module-level name, after executing what it takes."""
        self.define(name)
        return self.namespace[name]

    def define(self, name: str) -> None:
        """Execute the statements that bind or change a name, in the file's order; leave an _Absent if they fail."""
        if name in self._asked:
            return
        self._asked.add(name)
        for unit in self.units.get(name, ()):
            if id(unit) not in self._done:
                self._done.add(id(unit))
                self._execute(name, unit)
        if name in self.namespace or hasattr(builtins, name):
            return
        if name in self.units:
            self.namespace[name] = _Absent(name, f"no statement of {self.path.name} that ran gives it a value")
        else:
            self._from_stars(name)

    def _index(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            self.stars.append(statement)
        for name in dict.fromkeys(names_bound(statement)):
            self.units.setdefault(name, []).append(statement)

    def _index_registration(self, statement: ast.stmt) -> None:
        """A decorated function changes the tables that its decorator, defined in this file, writes it into."""
        for decorator in getattr(statement, "decorator_list", ()):
            for name in root(decorator.func if isinstance(decorator, ast.Call) else decorator):
                for unit in self.units.get(name, ()):
                    for used in names_read(unit, self.path) if isinstance(unit, ast.FunctionDef) else ():
                        if any(is_table(binding) for binding in self.units.get(used, ())):
                            self.units[used].append(statement)

    def _execute(self, name: str, unit: ast.stmt) -> None:
        if isinstance(unit, ast.Import | ast.ImportFrom):
            self._done.discard(id(unit))
            self._import(name, unit)
            return
        for needed in names_read(unit, self.path):
            self.define(needed)
        try:
            if isinstance(unit, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self._define_function_or_class(unit)
            else:
                self._run(unit)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(unit, ast.If | ast.Try | ast.With):
                self._inside(name, unit)
            if name not in self.namespace:
                why = f"line {unit.lineno} of {self.path.name} raised {describe(error)}"
                self.namespace[name] = _Absent(name, why)

    def _inside(self, name: str, unit: ast.stmt) -> None:
        """Take a name out of a block that failed as a whole: whichever of its statements can bind it."""
        for inner in ast.iter_child_nodes(unit):
            statements: list[ast.AST] = [*inner.body] if isinstance(inner, ast.ExceptHandler) else [inner]
            for statement in statements:
                if isinstance(statement, ast.stmt) and name in names_bound(statement):
                    self._execute(name, statement)
                    if not isinstance(self.namespace.get(name), _Absent):
                        return

    def _define_function_or_class(self, unit: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        unit = copy.copy(unit)
        kept = [node for node in unit.decorator_list if not self._lacks(node)]
        for node in unit.decorator_list:
            if node not in kept:
                self.notes.append(
                    f"the decorator @{ast.unparse(node)} of {unit.name} was left out: it is not available"
                )
        unit.decorator_list = kept
        if isinstance(unit, ast.ClassDef):
            for base in (*unit.bases, *(keyword.value for keyword in unit.keywords)):
                if self._lacks(base):
                    self.notes.append(f"{unit.name} was lifted without {ast.unparse(base)}, which is not available")
            unit.bases = [base for base in unit.bases if not self._lacks(base)]
            unit.keywords = [keyword for keyword in unit.keywords if not self._lacks(keyword.value)]
        try:
            self._run(unit)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not (unit.decorator_list or isinstance(unit, ast.ClassDef)):
                raise
            self.notes.append(
                f"{unit.name} was lifted bare, since as written line {unit.lineno} raised {describe(error)}"
            )
            unit.decorator_list = []
            if isinstance(unit, ast.ClassDef):
                unit.bases, unit.keywords = [], []
                unit.body = [node for node in unit.body if is_plain(node)] or [
                    ast.Pass(lineno=unit.lineno, col_offset=0)
                ]
            self._run(unit)

    def _lacks(self, node: ast.expr) -> bool:
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return any(isinstance(self.namespace.get(name), _Absent) for name in names)

    def _run(self, statement: ast.stmt) -> None:
        exec(compiled(statement, self.path), self.namespace)

    def _import(self, name: str, unit: ast.Import | ast.ImportFrom) -> None:
        """One name of an import statement, by itself."""
        single = copy.copy(unit)
        single.names = [alias for alias in unit.names if (alias.asname or alias.name.split(".")[0]) == name]
        try:
            self._run(single)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.namespace[name] = _Absent(name, f"line {unit.lineno} of {self.path.name} raised {describe(error)}")

    def _import_or_lift(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        """`__import__` of the lifted code: what cannot be imported is lifted too, if its source is found."""
        if level:
            return _LiftedModule(self._sibling(self._relative(name, level)))
        try:
            with searching(self.root):
                return builtins.__import__(name, globals, locals, fromlist, 0)
        except KeyboardInterrupt:
            raise
        except BaseException:
            source = source_of(name) if fromlist else None
            if source is None:
                raise
            return _LiftedModule(self._sibling(source))

    def _sibling(self, path: Path) -> _Lifter:
        return self.family.get(path) or _Lifter(path, self.family)

    def _relative(self, name: str, level: int) -> Path:
        folder = self.path.parents[level - 1]
        target = folder.joinpath(*name.split(".")) if name else folder
        for candidate in (target.with_suffix(".py"), target / "__init__.py"):
            if candidate.is_file():
                return candidate
        raise ModuleNotFoundError(f"there is no module {'.' * level}{name} beside {self.path}")

    def _from_stars(self, name: str) -> None:
        for statement in self.stars:
            single = copy.copy(statement)
            single.names = [ast.alias(name=name, lineno=statement.lineno, col_offset=0)]
            self._import(name, single)
            if isinstance(self.namespace.get(name), _Absent):
                del self.namespace[name]
            else:
                return
