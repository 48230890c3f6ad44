"""The functions of a source tree, and what was followed in each."""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kltest.scanning.flows import NOTHING, Flow, Seed, Value
from kltest.scanning.sources import Source
from kltest.scanning.syntax import FUNCTIONS


@dataclass(eq=False)
class Function:
    """A function of the tree; `owner` is the class that it stands in."""

    source: Source
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    owner: str = ""

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

    @property
    def parameters(self) -> list[str]:
        if isinstance(self.node, ast.Module):
            return []
        given = self.node.args
        return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


@dataclass(frozen=True)
class Arrival:
    """Where a flow arrives: `kind` is loss, reward, return, stored or logged; `name` what it is assigned to."""

    flow: Flow
    kind: str
    line: int
    name: str
    detached: bool = False


@dataclass
class Followed:
    """What was found in one function.

    `calls` are the functions of the tree that bring a seed, `shaped` those that make a divergence of a log-ratio.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    returned: Value = NOTHING
    kl_named: set[Seed] = field(default_factory=set)
    calls: list[tuple["Function", Seed]] = field(default_factory=list)
    shaped: list[tuple["Function", Seed]] = field(default_factory=list)


class Tree:
    """All functions of the sources, by name, and what was followed in each."""

    def __init__(self, sources: Sequence[Source], follow: Callable[["Tree", Function], Followed]) -> None:
        self._follow = follow
        self.sources = sources
        self.functions = [function for source in sources for function in _functions(source)]
        self.by_name: dict[str, list[Function]] = {}
        for function in self.functions:
            if function.name in ("forward", "__call__") and function.owner:
                self.by_name.setdefault(function.owner, []).append(function)
            self.by_name.setdefault(function.name, []).append(function)
        for attribute, made in _constructed(sources):
            # self.fkl = ForwardKLLoss(…): a call of self.fkl is one of its forward.
            for function in self.by_name.get(made, []):
                self.by_name.setdefault(attribute, []).append(function)
        self._followed: dict[Function, Followed] = {}
        self._open: set[Function] = set()

    def called(self, name: str, source: Source) -> list[Function]:
        """Return the functions that a call of that name may reach: those of the same file, else all of the tree."""
        found = self.by_name.get(name, [])
        return [function for function in found if function.source is source] or found

    def followed(self, function: Function) -> Followed:
        """Return what was found in a function; nothing while it is being followed itself."""
        if function not in self._followed:
            if function in self._open:
                return Followed()
            self._open.add(function)
            self._followed[function] = self._follow(self, function)
            self._open.discard(function)
        return self._followed[function]


def _constructed(sources: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """Yield the attributes of `self` to which an object of a loss's class is assigned, with the name of the class."""
    for source in sources:
        if "Loss(" not in source.text:
            continue
        for node in ast.walk(source.tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
            ):
                target = node.targets[0]
                if isinstance(target, ast.Attribute) and node.value.func.id.endswith("Loss"):
                    yield target.attr, node.value.func.id


def _functions(source: Source) -> Iterator[Function]:
    """Yield the functions of a file, with methods and inner functions, and its module-level statements last."""

    def below(node: ast.AST, owner: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                yield Function(source, child, owner)
                yield from below(child, owner)
            elif isinstance(child, ast.ClassDef):
                yield from below(child, child.name)
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from below(child, owner)

    yield from below(source.tree, "")
    yield Function(source, source.tree)
