"""Lifting: a function out of a file that cannot be imported, with the helpers, constants and imports that it uses.

The file is parsed, not executed. Those of its module-level statements run that the function needs, directly or
through what it uses. Each import is tried by itself; if it fails, the name is lifted out of the package's other file.
Annotations are not evaluated. A name without a value is replaced by an object that says why when it is used.
"""

import ast
import builtins
import copy
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kltest.loss.frames import describe, failure
from kltest.loss.importing import Imported, attribute, package_of, searching, source_of
from kltest.loss.syntax import DEFINITIONS, FUNCTIONS, compiled, names_bound, names_read, parse
from kltest.names import field_named

_PREFIX = "kltest_lifted_"
# How far above a file's package the folder may lie that one of its imports names, itself or in `src`.
FOLDERS_ABOVE = 3


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
    if head not in lifter.units:
        attribute(SimpleNamespace(**dict.fromkeys(lifter.units)), head, str(path))
    thing = lifter.get(head)
    if isinstance(thing, _Absent):
        text = f"{head} could not be lifted out of {path.name} ({vars(thing)['_why']}), and importing the file"
        raise failure(text, because, str(path)) from because
    found = attribute(SimpleNamespace(**{head: thing}), names, str(path))
    for taking in (found.function, getattr(found.owner, "__init__", None)):
        lifter.define_annotations(taking)
    note = f"{names} was lifted out of {path.name} by its syntax tree, since importing the file failed: "
    left_out = (note for each in lifter.family.values() for note in each.notes)
    return Imported(found.function, found.owner, (note + describe(because), *left_out))


class MissingNameError(NameError):
    """Lifted code used a name that has no value."""

    __module__ = "builtins"  # printed without the place of this class


class _Absent:
    """Stand-in for a module-level name without a value; any use of it raises MissingNameError."""

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


class _Lifted:
    """A file or a folder of the same tree, as an import names it: its names are lifted when they are read."""

    def __init__(self, path: Path, lifter: "_Lifter") -> None:
        self._path, self._lifter = path, lifter

    def __getattr__(self, name: str) -> Any:
        path, lifter = self._path, self._lifter
        if path == lifter.path and name in lifter.units:
            thing = lifter.get(name)
            if isinstance(thing, _Absent):
                raise ImportError(f"{path.name} has no usable {name}: {vars(thing)['_why']}")
            return thing
        folder = path.parent if path.name == "__init__.py" else path
        if inside := lifter.located(folder / name):
            return inside
        raise AttributeError(f"{path} defines no {name!r}")


class _Lifter:
    """The module-level names of one file, each executed when it is first needed."""

    def __init__(self, path: Path, family: "dict[Path, _Lifter] | None" = None) -> None:
        self.path = path
        self.root, name = package_of(path)
        self.family = {} if family is None else family
        self.family[path] = self
        self.notes: list[str] = []
        self.units: dict[str, list[ast.stmt]] = {}
        self.stars: list[ast.ImportFrom] = []
        for statement in parse(path).body:
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            for bound in dict.fromkeys(names_bound(statement, path)):
                self.units.setdefault(bound, []).append(statement)
        module = ModuleType(_PREFIX + name)
        sys.modules[module.__name__] = module  # dataclasses look their module up there
        self.namespace: dict[str, Any] = vars(module)
        self.namespace.update(__file__=str(path), __builtins__={**vars(builtins), "__import__": self._import_or_lift})
        self._done: set[int] = set()
        self._asked: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value of a module-level name, after executing the statements that it needs."""
        self.define(name)
        return self.namespace[name]

    def define(self, name: str) -> None:
        """Execute the statements that bind or change a name, in the file's order; leave an _Absent if they fail."""
        if name in self._asked:
            return
        self._asked.add(name)
        for unit in self.units.get(name, ()):
            if isinstance(unit, ast.Import | ast.ImportFrom):
                self._import(name, unit)
            elif id(unit) not in self._done:
                self._done.add(id(unit))
                self._execute(name, unit)
        if name in self.namespace or hasattr(builtins, name):
            return
        if name in self.units:
            self.namespace[name] = _Absent(name, f"no statement of {self.path.name} that ran gives it a value")
        else:
            self._from_stars(name)

    def define_annotations(self, function: Any) -> None:
        """Define the classes that annotate parameters which nothing else fills: they may be configurations."""
        for parameter in inspect.signature(function).parameters.values() if inspect.isfunction(function) else ():
            if parameter.default is parameter.empty and field_named(parameter.name) is None:
                for name in re.findall(r"\w+", str(parameter.annotation)):
                    if name in self.units:
                        self.define(name)

    def _execute(self, name: str, unit: ast.stmt) -> None:
        for needed in names_read(unit, self.path):
            self.define(needed)
        error = self._define(unit) if isinstance(unit, DEFINITIONS) else self._run(unit)
        if error is not None and name not in self.namespace:
            self._leave_absent(name, unit, error)

    def _define(self, unit: Any) -> BaseException | None:
        """Define a function or a class: without what is absent, then bare."""
        unit = copy.copy(unit)
        for node in filter(self._lacks, unit.decorator_list):
            self.notes.append(f"the decorator @{ast.unparse(node)} of {unit.name} was left out: it is not available")
        unit.decorator_list = [node for node in unit.decorator_list if not self._lacks(node)]
        is_class = isinstance(unit, ast.ClassDef)
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
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return any(isinstance(self.namespace.get(name), _Absent) for name in names)

    def _run(self, statement: ast.stmt) -> BaseException | None:
        """Execute a statement; return what it raised."""
        try:
            exec(compiled(statement, self.path), self.namespace)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return error
        return None

    def _leave_absent(self, name: str, unit: ast.stmt, error: BaseException) -> None:
        why = f"line {unit.lineno} of {self.path.name} raised {describe(error)}"
        if isinstance(error, ModuleNotFoundError):
            extra = "the extra `jax` of kltest" if error.name == "jax" else f"pip install {error.name}"
            why = f"{why.rstrip('.')} ({extra})"
        self.namespace[name] = _Absent(name, why)

    def _import(self, name: str, unit: ast.Import | ast.ImportFrom) -> None:
        """Import one name of an import statement by itself."""
        single = copy.copy(unit)
        single.names = [alias for alias in unit.names if (alias.asname or alias.name.split(".")[0]) == name]
        if error := self._run(single):
            self._leave_absent(name, unit, error)

    def _from_stars(self, name: str) -> None:
        for statement in self.stars:
            single = copy.copy(statement)
            single.names = [ast.alias(name=name, lineno=statement.lineno, col_offset=0)]
            if self._run(single) is None:
                return

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
                return _Lifted(file, self.family.get(file) or _Lifter(file, self.family))
        return _Lifted(path, self) if path.is_dir() else None


def _runs_alone(node: ast.stmt) -> bool:
    """Return True for the parts of a class's body that need nothing else: methods and constants."""
    constant = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, FUNCTIONS)
