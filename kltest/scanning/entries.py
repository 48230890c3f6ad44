"""A source tree as graphs: each function, entered with nothing known of its call, with what it returns and stores."""

import ast
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from kltest.scanning.measured import FAILURES
from kltest.scanning.sources import Source
from kltest.scanning.unfolding import Unfolding
from kltest.symbolic.calls import branches_of, defaults_of
from kltest.symbolic.evaluate import BUDGET, Evaluator
from kltest.symbolic.modules import Modules
from kltest.symbolic.operations import MODULES
from kltest.symbolic.roles import Fact, Roles
from kltest.symbolic.values import INPUT, Builtin, External, Function, Graph, Kind, Scope, Stored, TooLargeError
from kltest.symbolic.words import is_mask, says_kl, side

MODULE = "<module>"
"""The title of a module's own statements."""
OUTSIDE = sys.stdlib_module_names | {module.partition(".")[0] for module in MODULES}
"""Packages that a tree imports from outside, though a file of it may be called the same."""
NO_FACTS: Mapping[str, Fact] = {}
A_STATEMENT = 10
"""What each statement of a module adds to the budget of what is followed of it."""
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


@dataclass(eq=False)
class Entry:
    """A function that was entered: what it returns and stores, in a graph of its own.

    Attributes:
        source: its file.
        function: itself.
        kind: the class that it is entered as a method of.
        owner: the name of its class.
        around: the graph of the function that defines it.
        returned: what it returns.
        stores: what it and the functions that it calls store.
        failure: why it was not followed to its end.
    """

    source: Source
    function: Function
    kind: Kind | None
    owner: str
    graph: Graph
    around: Graph | None = None
    returned: Any = None
    stores: Sequence[Stored] = ()
    failure: str = ""

    @property
    def title(self) -> str:
        """`Class.method`."""
        return f"{self.owner}.{self.function.name}" if self.owner else self.function.name

    @cached_property
    def roles(self) -> Roles:
        """Facts of the nodes of its graph."""
        return Roles(self.graph)

    @cached_property
    def sees_masks(self) -> bool:
        """Whether the function speaks of masks."""
        return any(map(is_mask, _names(self.function.definition)))

    @cached_property
    def unfolding(self) -> Unfolding:
        """Configurations of what is in its graph."""
        return Unfolding(self.roles)


@dataclass(frozen=True)
class Place:
    """A function of a file and its lines."""

    title: str
    first: int
    last: int

    @property
    def name(self) -> str:
        """Its own name, without those of classes and functions that it is in."""
        return self.title.rpartition(".")[2]

    @property
    def is_test(self) -> bool:
        """True for a function of tests."""
        return self.name.startswith("test_")


@dataclass
class Tree:
    """The files of a tree, by the paths that their functions are known by; `lost` are functions that were not read.

    Functions of the files `looked_at` are entered, of all if there are none; others are followed where they are called.
    Somebody may have `asked` for one function by its name.
    `interrupted` is true if not all of them were. `seen` are lines of what other functions put into losses or metrics,
    and `logged` those of what is called a KL and has probabilities of two sides in it.
    """

    sources: Mapping[str, Source]
    looked_at: Collection[str] = ()
    asked: str = ""
    evaluator: Evaluator = field(init=False)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.modules = Modules({name: (lambda s=source: s.tree) for name, source in self.sources.items()})  # type: ignore[misc]
        self.evaluator = Evaluator(self._scope_of)
        self._open: set[str] = set()
        self._ends: dict[str, dict[int, int]] = {}
        self.lost: list[str] = []
        self.seen: set[tuple[str, int]] = set()
        self.logged: set[tuple[str, int]] = set()
        self._given: dict[tuple[Any, str], set[Fact]] = {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Defaults of options: the constants of classes, modules and arguments, where all of one name agree.

        An option without one that is given to a parameter of the `asked` function has the default of that.
        """
        said: dict[str, set[Any]] = {}
        for source in self.sources.values():
            for node in ast.walk(source.tree):
                name, default = option(node)
                if isinstance(default, ast.Constant):
                    said.setdefault(name, set()).add(default.value)
        given: dict[str, set[Any]] = {}
        for name, default in chain(*(_given(self.sources[file].tree, self.asked) for file in self.looked_at)):
            given.setdefault(name, set()).add(default)
        found = {**given, **said}
        return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}

    @cached_property
    def options(self) -> dict[str, list[Any]]:
        """The values that attributes may have by their annotation, of each name that is always annotated with some."""
        found: dict[str, list[list[Any]]] = {}
        for source in self.sources.values():
            for owner in (one for one in ast.walk(source.tree) if isinstance(one, ast.ClassDef)):
                for one in owner.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        found.setdefault(one.target.id, []).append(_literals(one.annotation))
        return {name: list(dict.fromkeys(chain(*several))) for name, several in found.items() if all(several)}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each file, from 1."""
        return {name: number for number, name in enumerate(self.sources, 1)}

    @cached_property
    def places(self) -> dict[str, list[Place]]:
        """The functions of each file, inner ones first."""
        return {name: places_in(source.tree) for name, source in self.sources.items()}

    def end_of(self, file: str, line: int) -> int:
        """Return the last line of a call that begins on a line; the line itself if none does."""
        if file not in self._ends:
            calls = [node for node in ast.walk(self.sources[file].tree) if isinstance(node, ast.Call)]
            longest = sorted(calls, key=lambda one: one.end_lineno or 0, reverse=True)
            self._ends[file] = {one.lineno: one.end_lineno or one.lineno for one in longest}
        return self._ends[file].get(line, line)

    def _scope_of(self, importer: str, name: str) -> Scope | None:
        if name.partition(".")[0] in OUTSIDE:
            return None
        file = self.modules.find(importer, name)
        return None if file is None else self.scope(file)

    def scope(self, file: str) -> Scope | None:
        """Return the variables of a module, of one that is too large the first of them; None while it is being read."""
        if file in self._open:
            return None
        self._open.add(file)
        before = self.evaluator.left, self.evaluator.frames
        tree = self.sources[file].tree
        self.evaluator.frames, self.evaluator.left = [], BUDGET + A_STATEMENT * len(tree.body)
        try:
            return self.evaluator.module(file, tree)
        except (TooLargeError, RecursionError):
            self.lost.append(f"{self.sources[file].place(1)}: its own statements are followed in part")
            return self.evaluator.module(file, tree)
        finally:
            self.evaluator.left, self.evaluator.frames = before
            self._open.discard(file)

    def entries(self) -> Iterator[Entry]:
        """Yield each function of the tree that speaks of log-probs or of a KL, but tests of it."""
        for file in self.looked_at or self.sources:
            source = self.sources[file]
            wanted = [
                node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            wanted = [one for one in wanted if not one.name.startswith("test_") and speaks_of_probabilities(one)]
            script = [one for one in source.tree.body if not isinstance(one, DEFINITIONS)]
            runs = any(map(speaks_of_probabilities, script))
            if (wanted or runs) and (scope := self.scope(file)) is not None:
                for function, kind in functions(scope.variables, file):
                    if function.definition in wanted:
                        yield from self._with_inner(source, function, kind, wanted)
                if runs:
                    yield self.entered(source, _script(source.tree, scope), None)

    def remember(self, entry: Entry) -> None:
        """Remember what the calls of an entry give to the parameters of functions."""
        for parameter, values in entry.graph.given.items():
            facts = map(entry.roles.of, values)
            self._given.setdefault(parameter, set()).update(fact for fact in facts if fact.is_field)

    def otherwise(self, entry: Entry) -> Entry | None:
        """Return a function with what its callers say of its parameters; None if that is nothing new."""
        spec, told = entry.function.definition.args, {}
        for name in (one.arg for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)):
            facts = self._given.get((entry.function.definition, name), set())
            if len(facts) == 1:
                (told[name],) = facts
        own = {name: entry.roles.of(entry.graph.node(INPUT, name)) for name in told}
        # A name that says whose something is says it for all callers.
        told = {name: replace(fact, sides=own[name].sides or fact.sides) for name, fact in told.items()}
        return None if told == own else self.entered(entry.source, entry.function, entry.kind, told, entry.around)

    def _with_inner(
        self, source: Source, function: Function, kind: Kind | None, wanted: list[Any], around: Graph | None = None
    ) -> Iterator[Entry]:
        """Yield a function, and those that it defines and only gives away: to what compiles them, or in a class."""
        entry, followed = self.entered(source, function, kind, around=around), dict(self.evaluator.followed)
        yield entry
        scope = followed.get(function.definition)
        for inner, its in functions(scope.variables if scope else {}, function.scope.file):
            if inner.definition in wanted and inner.definition not in followed:
                yield from self._with_inner(source, inner, its, wanted, entry.graph)

    def entered(
        self,
        source: Source,
        function: Function,
        kind: Kind | None,
        told: Mapping[str, Fact] = NO_FACTS,
        around: Graph | None = None,
    ) -> Entry:
        """Return a function as it is followed with nothing known of its call but facts of its parameters.

        `around` is the graph of the function that defines it.
        """
        evaluator = self.evaluator
        evaluator.renew(around.copy() if around else None)
        owner = function.owner.definition.name if function.owner else ""
        entry = Entry(source, function, kind, owner, evaluator.graph, around)
        try:
            entry.returned = evaluator.entered(function, kind)
        except TooLargeError as error:
            entry.failure = str(error)
        except RecursionError:
            entry.failure = "it is nested too deeply"
        except FAILURES as error:  # one function that the evaluator stumbles over ends no scan
            entry.failure = f"it cannot be followed: {error}"
        bases = function.owner.bases if function.owner else ()
        if any(isinstance(base, External) and base.path.endswith("autograd.Function") for base in bases):
            entry.failure = "its gradient is written by hand"
        entry.stores, entry.graph = evaluator.stores, evaluator.graph
        entry.graph.facts = {entry.graph.node(INPUT, name): fact for name, fact in told.items()}
        attributes = [one for one in entry.graph.nodes if one.operation == "attribute"]
        named = {one: self.options[one.arguments[1]] for one in attributes if one.arguments[1] in self.options}
        entry.graph.options |= named
        return entry


def _script(tree: ast.Module, scope: Scope) -> Function:
    """Return the statements of a module as a function of nothing, as they are followed where it is run."""
    definition = ast.parse("def _(): pass").body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.name, definition.body = MODULE, tree.body
    return Function(definition, Scope(scope.file, {"__name__": "__main__"}, scope))


def names_kl(node: ast.AST) -> bool:
    """Return True if a name, attribute or key in it says KL."""
    return any(map(says_kl, _names(node)))


def assigned(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield the variables that are computed of probabilities, with the first and last line of each.

    What is made of something that is called a KL itself is left out.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Call | ast.UnaryOp | ast.IfExp):
            names = [*_names(node.value)]
            if any(side(name) is not None for name in names) and not any(map(says_kl, names)):
                targets = (target for target in node.targets if isinstance(target, ast.Name))
                yield from ((target.id, node.lineno, node.end_lineno or node.lineno) for target in targets)


def speaks_of_probabilities(node: ast.AST) -> bool:
    """Return True if a name, attribute or key in it says log-probs, logits or KL."""
    return any(says_kl(name) or side(name) is not None for name in _names(node))


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names, attributes and keys in a piece of code."""
    for inner in ast.walk(node):
        for name in (getattr(inner, part, None) for part in ("id", "attr", "arg", "value", "name")):
            if isinstance(name, str) and name.isidentifier():
                yield name


def option(node: ast.AST) -> tuple[str, ast.expr | None]:
    """Return the name and the default of an option: of an annotated variable, or of `add_argument("--name")`."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), value=value):
            fields = value.keywords if isinstance(value, ast.Call) else []
            return name, next((one.value for one in fields if one.arg == "default"), value)
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(flag)), *_]):
            given = {one.arg: one.value for one in node.keywords}
            switch = getattr(given.get("action"), "value", None)
            default = ast.Constant(False) if switch == "store_true" else given.get("default")
            return flag.rpartition(".")[2].lstrip("-").replace("-", "_"), default
        case _:
            return "", None


def _given(tree: ast.Module, function: str) -> Iterator[tuple[str, Any]]:
    """Yield attributes that a function of a file is given for parameters with a default, with that default."""
    nodes = list(ast.walk(tree))
    defaults: dict[str, Any] = {}
    for one in nodes:
        if isinstance(one, ast.FunctionDef) and one.name == function:
            its = defaults_of(one.args)
            defaults |= {name: value.value for name, value in its.items() if isinstance(value, ast.Constant)}
    for one in nodes:
        if isinstance(one, ast.Call) and function in (getattr(one.func, "attr", ""), getattr(one.func, "id", "")):
            for each in one.keywords:
                if isinstance(each.value, ast.Attribute) and each.arg in defaults:
                    yield each.value.attr, defaults[each.arg]


def _literals(annotation: ast.expr) -> list[Any]:
    """Return the constants that an annotation names with `Literal`; none if it allows something else."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal"), slice=inner):
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            found = [one.value for one in values if isinstance(one, ast.Constant)]
            return found if len(found) == len(values) else []
        case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=inner):
            return [*found, None] if (found := _literals(inner)) else []
        case ast.BinOp(left=one, op=ast.BitOr(), right=ast.Constant(value=None)):
            return [*found, None] if (found := _literals(one)) else []
        case _:
            return []


def functions(variables: Mapping[str, Any], file: str) -> Iterator[tuple[Function, Kind | None]]:
    """Yield the functions and methods that a file defines, with the class of a method."""
    # What is defined in a branch is a choice.
    for value in [one for each in list(variables.values()) for one in branches_of(each)]:
        if isinstance(value, Function) and value.scope.file == file:
            yield value, None
        elif isinstance(value, Kind):
            for member in value.entries.values():
                static = isinstance(member, Builtin) and member.name == "staticmethod"
                inner = member.function() if isinstance(member, Builtin) else member
                if isinstance(inner, Function) and inner.scope.file == file:
                    yield inner, None if static else value


def places_in(tree: ast.Module) -> list[Place]:
    """Return the functions of a file, inner ones first."""
    found: list[Place] = []

    def walk(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                walk(child, owner)
                title = f"{owner}.{child.name}" if owner else child.name
                found.append(Place(title, child.lineno, child.end_lineno or child.lineno))
            else:
                walk(child, child.name if isinstance(child, ast.ClassDef) else owner)

    walk(tree, "")
    return found
