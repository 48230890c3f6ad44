"""Lifting: a function out of a file that cannot be imported, with the helpers, constants and imports that it uses.

The file is parsed, not executed. Of its module-level statements, those run that the function needs, directly or
through what it uses; each import is tried by itself, and follows into the package's other files where it fails.
Annotations are not evaluated. What cannot be had is replaced by an object that says so when it is used.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import dis
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

from kltest.targets.frames import describe, failure
from kltest.targets.importing import Found, attribute, package_of, searching, source_of

_FLAGS = __future__.annotations.compiler_flag
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lift(path: Path, names: str, *, because: BaseException) -> Found:
    """The function (or `Class.method`) of that name in a file, without importing the file.

    `because` is what importing it raised. Raises UsageError if the file has no such name, FailedError where the
    statements that it needs fail.
    """
    lifter = _Lifter(path)
    head = names.split(".")[0]
    if not lifter.knows(head):
        holder = SimpleNamespace(**dict.fromkeys(lifter.units))
        attribute(holder, head, str(path))
    try:
        thing = lifter.get(head)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise failure(f"lifting {head} out of {path.name}", error, str(path)) from error
    if isinstance(thing, _Absent):
        raise failure(f"importing {path.name} failed, and {head} could not be lifted out of it: it", because, str(path))
    found = attribute(SimpleNamespace(**{head: thing}), names, str(path))
    note = f"{names} was lifted out of {path.name} by its syntax tree, since importing the file failed: "
    return Found(found.function, found.owner, (note + describe(because), *lifter.notes))


class MissingNameError(NameError):
    """Lifted code used something that could not be had."""


class _AbsentType(type):
    """Makes `isinstance(x, absent)` say what is missing too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance)


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
        if not self._lifter.knows(name):
            raise AttributeError(f"{self._lifter.path} defines no {name!r}")
        return self._lifter.get(name)


class _Lifter:
    """The module-level names of one file, each executed when it is first needed."""

    def __init__(self, path: Path, family: dict[Path, _Lifter] | None = None) -> None:
        self.path = path
        self.notes: list[str] = []
        self.root, self.module = package_of(path)
        self.family = {} if family is None else family
        self.family[path] = self
        tree = ast.parse(path.read_bytes(), filename=str(path))
        self.units: dict[str, list[ast.stmt]] = {}
        self.stars: list[ast.ImportFrom] = []
        for statement in tree.body:
            self._index(statement)
        self.namespace: dict[str, Any] = {"__name__": self.module, "__file__": str(path), "__builtins__": builtins}
        self._done: set[int] = set()
        self._asked: set[str] = set()

    def knows(self, name: str) -> bool:
        return name in self.units

    def get(self, name: str) -> Any:
        """The value of a module-level name, after executing what it takes."""
        self.define(name)
        return self.namespace[name]

    def define(self, name: str) -> None:
        """Execute the statements that bind or change a name, in the file's order; leave an _Absent where they fail."""
        if name in self._asked:
            return
        self._asked.add(name)
        for unit in self.units.get(name, ()):
            if id(unit) not in self._done:
                self._done.add(id(unit))
                self._execute(name, unit)
        if name not in self.namespace and name not in self.units and not hasattr(builtins, name):
            self._from_stars(name)

    def _index(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            self.stars.append(statement)
        for name in dict.fromkeys(_bound(statement)):
            self.units.setdefault(name, []).append(statement)

    def _execute(self, name: str, unit: ast.stmt) -> None:
        if isinstance(unit, ast.Import | ast.ImportFrom):
            self._done.discard(id(unit))
            self._import(name, unit)
            return
        for needed in _globals(unit, self.path):
            self.define(needed)
        if isinstance(unit, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            self._define_function_or_class(unit)
            return
        try:
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
            for statement in inner.body if isinstance(inner, ast.ExceptHandler) else [inner]:
                if isinstance(statement, ast.stmt) and name in _bound(statement):
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
                unit.body = [node for node in unit.body if _plain(node)] or [ast.Pass(lineno=unit.lineno, col_offset=0)]
            self._run(unit)

    def _lacks(self, node: ast.expr) -> bool:
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return any(isinstance(self.namespace.get(name), _Absent) for name in names)

    def _run(self, statement: ast.stmt) -> None:
        exec(_compiled(statement, self.path), self.namespace)

    def _import(self, name: str, unit: ast.Import | ast.ImportFrom) -> None:
        """One name of an import statement; where that fails, out of the source of the module that it names."""
        alias = next(alias for alias in unit.names if (alias.asname or alias.name.split(".")[0]) == name)
        single = copy.copy(unit)
        single.names = [alias]
        if isinstance(single, ast.ImportFrom) and single.level:
            self._follow(name, alias.name, self._relative(single), None)
            return
        try:
            with searching(self.root):
                self._run(single)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            module = alias.name if isinstance(single, ast.Import) else str(single.module)
            source = source_of(module)
            self._follow(name, alias.name if isinstance(single, ast.ImportFrom) else None, source, error)

    def _follow(self, name: str, wanted: str | None, source: Path | None, error: BaseException | None) -> None:
        why = describe(error) if error else "its file was not found"
        if source is not None and source.is_file() and wanted is not None:
            lifter = self.family.get(source) or _Lifter(source, self.family)
            submodule = source.parent / f"{wanted}.py" if source.name == "__init__.py" else None
            if lifter.knows(wanted):
                self.namespace[name] = lifter.get(wanted)
                self.notes += [note for note in lifter.notes if note not in self.notes]
                return
            if submodule is not None and submodule.is_file():
                self.namespace[name] = _LiftedModule(self.family.get(submodule) or _Lifter(submodule, self.family))
                return
            why = f"{source} does not define {wanted}"
        elif source is not None and source.is_dir() and wanted is not None:
            submodule = source / f"{wanted}.py"
            if submodule.is_file():
                self.namespace[name] = _LiftedModule(self.family.get(submodule) or _Lifter(submodule, self.family))
                return
        self.namespace[name] = _Absent(name, why)

    def _relative(self, statement: ast.ImportFrom) -> Path:
        folder = self.path.parent
        for _ in range(statement.level - 1):
            folder = folder.parent
        target = folder.joinpath(*(statement.module or "").split(".")) if statement.module else folder
        for candidate in (target.with_name(target.name + ".py"), target / "__init__.py"):
            if candidate.is_file():
                return candidate
        return target

    def _from_stars(self, name: str) -> None:
        for statement in self.stars:
            single = copy.copy(statement)
            single.names = [ast.alias(name=name, lineno=statement.lineno, col_offset=0)]
            self._import(name, single)
            if isinstance(self.namespace.get(name), _Absent):
                del self.namespace[name]
            else:
                return


def _compiled(statement: ast.stmt, path: Path) -> CodeType:
    tree = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
    return compile(tree, str(path), "exec", flags=_FLAGS, dont_inherit=True)


def _globals(statement: ast.stmt, path: Path) -> list[str]:
    """The module-level names that a statement reads when it runs or, for a function, when it is called."""
    found: dict[str, None] = {}
    codes = [_compiled(statement, path)]
    while codes:
        code = codes.pop()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found[instruction.argval] = None
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return list(found)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The module-level names that a statement binds, or changes in place."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        yield statement.name
        return
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names if alias.name != "*")
        return
    if isinstance(statement, ast.If) and _type_checking(statement.test):
        return
    if isinstance(statement, ast.Expr):
        yield from _receivers(statement.value)
        return
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield from _bound(node)
        elif isinstance(node, ast.ExceptHandler):
            for inner in node.body:
                yield from _bound(inner)
        elif isinstance(node, ast.expr | ast.withitem):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id
                elif isinstance(inner, ast.Subscript | ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield from _root(inner)


def _receivers(call: ast.expr) -> Iterator[str]:
    """`TABLE.update(…)` changes TABLE."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        yield from _root(call.func)


def _root(node: ast.expr) -> Iterator[str]:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def _type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _plain(node: ast.stmt) -> bool:
    return isinstance(node, _FUNCTIONS) or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
