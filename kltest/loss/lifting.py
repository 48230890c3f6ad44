"""Lifting: a function out of a file that cannot be imported, with the helpers, constants and imports that it uses.

The file is parsed, not executed. A module-level name gets its value when it is first read: the statements run that bind
or change it, and so what these read. Each import is tried by itself; if it fails, the name is lifted out of the
package's other file. Annotations are not evaluated. A name without a value says why where it is used.
"""

import __future__

import ast
import builtins
import copy
import dis
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from kltest.loss.frames import describe, failure
from kltest.loss.importing import Imported, attribute, package_of, searching, source_of

_PREFIX = "kltest_lifted_"
# Levels above a file's package at which the folder may lie that one of its imports names, itself or in `src`.
FOLDERS_ABOVE = 3
_FLAGS = __future__.annotations.compiler_flag
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


def lift(path: Path, names: str, *, because: BaseException) -> Imported:
    """Take the function (or `Class.method`) of that name out of a file, without importing the file.

    Args:
        path: the file.
        names: the function, or `Class.method`.
        because: the exception that importing the file raised.

    Raises:
        UsageError: the file has no such name.
        FailedError: the statements that it needs fail.
    """
    lifter = _Lifter(path)
    head = names.split(".")[0]
    if head not in lifter.statements:
        attribute(SimpleNamespace(**dict.fromkeys(lifter.statements)), head, str(path))
    try:
        thing = lifter.namespace[head]
    except MissingNameError as missing:
        text = f"{head} could not be lifted out of {path.name} ({missing.why}), and importing the file"
        raise failure(text, because, str(path)) from because
    found = attribute(SimpleNamespace(**{head: thing}), names, str(path))
    note = f"{names} was lifted out of {path.name} by its syntax tree, since importing the file failed: "
    return Imported(found.function, found.owner, (note + describe(because), *lifter.notes))


class MissingNameError(NameError):
    """Lifted code used a name that has no value; `why` not."""

    __module__ = "builtins"  # printed without the place of this class

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} is not available to the lifted function: {why}")
        self.why = why


class _Namespace(dict[str, Any]):
    """The module-level names of a file, each lifted when it is first read."""

    def __init__(self, lifter: "_Lifter") -> None:
        super().__init__()
        self._lifter = lifter

    def __missing__(self, name: str) -> Any:
        if name not in self._lifter.statements and not self._lifter.stars:
            raise KeyError(name)
        self._lifter.define(name)
        if name in self:
            return self[name]
        if name not in self._lifter.statements:
            raise KeyError(name)
        raise MissingNameError(name, self._lifter.failed[name])


class _Lifted:
    """A file or a folder of the same tree, as an import names it: its names are lifted when they are read."""

    def __init__(self, path: Path, lifter: "_Lifter") -> None:
        self._path, self._lifter = path, lifter

    def __getattr__(self, name: str) -> Any:
        path, lifter = self._path, self._lifter
        if path == lifter.path and name in lifter.statements:
            try:
                return lifter.namespace[name]
            except MissingNameError as missing:
                raise ImportError(f"{path.name} has no usable {name}: {missing.why}") from missing
        folder = path.parent if path.name == "__init__.py" else path
        if inside := lifter.located(folder / name):
            return inside
        raise AttributeError(f"{path} defines no {name!r}")


class _Lifter:
    """The statements of one file, by the names that they bind or change; those that `failed`, with the reason."""

    def __init__(self, path: Path, family: "_Lifter | None" = None) -> None:
        self.path = path
        self.root, name = package_of(path)
        self.files: dict[Path, _Lifter] = family.files if family else {}
        self.notes: list[str] = family.notes if family else []
        self.files[path] = self
        self.statements: dict[str, list[ast.stmt]] = {}
        self.stars: list[ast.ImportFrom] = []
        self.failed: dict[str, str] = {}
        self._done: set[str | ast.stmt] = set()
        for statement in parse(path).body:
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            for bound in dict.fromkeys(_names_bound(statement, path)):
                self.statements.setdefault(bound, []).append(statement)
        sys.modules[_PREFIX + name] = ModuleType(_PREFIX + name)  # dataclasses look their module up there
        self.namespace = _Namespace(self)
        functions = {**vars(builtins), "__import__": self._import_or_lift}
        self.namespace.update(__name__=_PREFIX + name, __file__=str(path), __builtins__=functions)

    def define(self, name: str) -> None:
        """Execute the statements that bind or change a name, in the file's order."""
        if name in self._done:
            self.failed.setdefault(name, f"the statements of {self.path.name} that give it a value need it")
            return
        self._done.add(name)
        self.failed[name] = f"no statement of {self.path.name} that ran gives it a value"
        for statement in self.statements.get(name, ()):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._import(name, statement)
            elif statement not in self._done:
                self._done.add(statement)
                error = self._define(statement) if isinstance(statement, _DEFINITIONS) else self._run(statement)
                if error is not None:
                    self._fail(name, statement, error)
                for bound in _names_bound(statement, self.path):
                    if bound in self.namespace:
                        self.define(bound)
        for statement in () if name in self.statements or hasattr(builtins, name) else self.stars:
            single = copy.copy(statement)
            single.names = [ast.alias(name=name, lineno=statement.lineno, col_offset=0)]
            if self._run(single) is None:
                return

    def _define(self, unit: Any) -> BaseException | None:
        """Define a function or a class: without what is absent, then bare."""
        unit, is_class = copy.copy(unit), isinstance(unit, ast.ClassDef)
        for node in filter(self._lacks, unit.decorator_list):
            self.notes.append(f"the decorator @{ast.unparse(node)} of {unit.name} was left out: it is not available")
        unit.decorator_list = [node for node in unit.decorator_list if not self._lacks(node)]
        if is_class:
            for base in filter(self._lacks, (*unit.bases, *(keyword.value for keyword in unit.keywords))):
                self.notes.append(f"{unit.name} was lifted without {ast.unparse(base)}, which is not available")
            unit.bases = [base for base in unit.bases if not self._lacks(base)]
            unit.keywords = [keyword for keyword in unit.keywords if not self._lacks(keyword.value)]
        error = self._run(unit)
        if error is None or not (unit.decorator_list or is_class):
            return error
        self.notes.append(f"{unit.name} was lifted bare, since as written line {unit.lineno} raised {describe(error)}")
        unit.decorator_list = []
        if is_class:
            unit.bases, unit.keywords = [], []
            unit.body = list(filter(_runs_alone, unit.body)) or [ast.Pass(lineno=unit.lineno, col_offset=0)]
        return self._run(unit)

    def _lacks(self, node: ast.expr) -> bool:
        for inner in ast.walk(node):
            try:
                self.namespace[inner.id if isinstance(inner, ast.Name) else "__name__"]
            except KeyError:  # a built-in
                continue
            except MissingNameError:
                return True
        return False

    def _run(self, statement: ast.stmt) -> BaseException | None:
        """Execute a statement; return what it raised."""
        try:
            exec(compiled(statement, self.path), self.namespace)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return error
        return None

    def _fail(self, name: str, statement: ast.stmt, error: BaseException) -> None:
        why = f"line {statement.lineno} of {self.path.name} raised {describe(error)}"
        if isinstance(error, ModuleNotFoundError):
            extra = "the extra `jax` of kltest" if error.name == "jax" else f"pip install {error.name}"
            why = f"{why.rstrip('.')} ({extra})"
        self.failed[name] = why

    def _import(self, name: str, statement: ast.Import | ast.ImportFrom) -> None:
        """Import one name of an import statement by itself."""
        single = copy.copy(statement)
        single.names = [alias for alias in statement.names if (alias.asname or alias.name.split(".")[0]) == name]
        if error := self._run(single):
            self._fail(name, statement, error)

    def _import_or_lift(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0
    ) -> Any:
        """Stand for `__import__` in the lifted code: lift what cannot be imported, if its source is found."""
        parts = [part for part in name.split(".") if part]
        if level:
            if found := self.located(self.path.parents[level - 1].joinpath(*parts)):
                return found
            raise ModuleNotFoundError(f"there is no module {'.' * level}{name} beside {self.path}")
        try:
            with searching(self.root):
                return builtins.__import__(name, globals, locals, fromlist, 0)
        except KeyboardInterrupt:
            raise
        except BaseException:
            # `import package.module` binds the package, whose module is lifted when it is read.
            parts = parts if fromlist else parts[:1]
            source = source_of(".".join(parts))
            places = [source.with_suffix("")] if source else []
            for base in (self.root, *self.root.parents[:FOLDERS_ABOVE]):
                places += [base.joinpath(*parts), base.joinpath("src", *parts)]
            if found := next(filter(None, map(self.located, places)), None):
                return found
            raise

    def located(self, path: Path) -> _Lifted | None:
        """Return the package, module or folder at a path without suffix, None if there is none."""
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return _Lifted(file, self.files.get(file) or _Lifter(file, self))
        return _Lifted(path, self) if path.is_dir() else None


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file; FailedError if it is no Python."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
        compile(tree, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OSError) as error:
        raise failure(f"reading {path.name}", error, str(path)) from error
    return tree


def compiled(statement: ast.stmt, path: Path) -> CodeType:
    """Return one statement as code of the file that it came from, its annotations left as text."""
    tree = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
    return compile(tree, str(path), "exec", flags=_FLAGS, dont_inherit=True)


def _names_bound(statement: ast.stmt, path: Path) -> Iterator[str]:
    """Yield the module-level names that a statement binds, or changes in place."""
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
        return
    for instruction in dis.get_instructions(compiled(statement, path)):
        if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            yield instruction.argval
    for node in ast.walk(statement):
        changed = None
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            changed = node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            # `TABLE.update(…)` changes TABLE; `print(…)` changes nothing.
            changed = getattr(node.value.func, "value", None)
        while isinstance(changed, ast.Subscript | ast.Attribute):
            changed = changed.value
        if isinstance(changed, ast.Name):
            yield changed.id


def _runs_alone(node: ast.stmt) -> bool:
    """Return True for the parts of a class's body that need nothing else: methods and constants."""
    constant = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, _FUNCTIONS)
