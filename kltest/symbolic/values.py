"""Values of the evaluator: nodes of a graph, and the objects of Python that hold them.

A node is an operation with arguments, and exists once: two expressions that compute the same of the same are one node.
Constants of Python stand for themselves, and so do tuples, lists and dictionaries. Where two branches join, a value
that differs is a node `choice(condition, then, otherwise)`.
"""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kltest.errors import KltestError
from kltest.symbolic.operations import constant_of, is_constant

T = TypeVar("T")

CHOICE = "choice"
# Operations that make a node from nothing of the graph: a parameter, or a name of which nothing is known.
INPUT = "input"
# The input that stands for an entry which only one of two branches made.
ABSENT = "absent"


class TooLargeError(KltestError):
    """An evaluation that follows more statements than its budget."""


class Node:
    """An operation and its arguments: nodes, constants, and tuples of them. Made by a Graph alone.

    Attributes:
        operation: name of the operation: a function of torch, an operator, or one of the evaluator's own.
        arguments: arguments by position.
        named: pairs of a name and an argument, sorted by name.
        number: place in the order in which the nodes of the graph were made; an argument comes before its user.
        parts: the nodes among the arguments, those inside tuples as well.
    """

    __slots__ = ("arguments", "named", "number", "operation", "parts")

    def __init__(self, operation: str, arguments: tuple[Any, ...], named: tuple[tuple[str, Any], ...], number: int):
        self.operation, self.arguments, self.named, self.number = operation, arguments, named, number
        self.parts = tuple(nodes_in((*arguments, *(value for _, value in named))))

    def __repr__(self) -> str:
        """Return the operation and the number: written out, a graph is longer than any memory."""
        return f"{self.operation}#{self.number}"


def under(value: Any, operations: Collection[str]) -> Any:
    """Return what a value was before some operations were applied to it, one after the other."""
    while isinstance(value, Node) and value.operation in operations:
        value = value.arguments[0]
    return value


def nodes_in(value: Any) -> Iterator[Node]:
    """Yield the nodes in a value, at any depth of tuples, lists, dictionaries and slices."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, dict):
        yield from nodes_in(tuple(value.values()))
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from nodes_in(one)


def walked(start: Iterable[T], onward: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield things, as nodes, and those that come after them, the nearest first and each once."""
    found = list(dict.fromkeys(start))
    seen = set(found)
    for one in found:
        yield one
        new = [other for other in dict.fromkeys(onward(one)) if other not in seen]
        seen.update(new)
        found += new


def reached(value: Any, known: Collection[Node] = ()) -> set[Node]:
    """Return the nodes that a value is made of, without those that are known and what they are made of."""
    found: set[Node] = set()
    stack = list(nodes_in(value))
    while stack:
        if (node := stack.pop()) not in found and node not in known:
            found.add(node)
            stack.extend(() if node.operation == INPUT else node.parts)
    return found


def carried_along(carried: Sequence[Node], after: Sequence[Any], places: Iterable[int]) -> list[int]:
    """Return the places of the variables of a loop that those at some places need, and these."""
    found: set[int] = set()
    more = set(places)
    while more - found:
        found |= more
        met = reached([after[at] for at in found])
        more = {at for at, one in enumerate(carried) if one in met}
    return sorted(found)


def mapped(value: Any, of: Callable[[Node], Any]) -> Any:
    """Return a value with others in place of its nodes, at any depth of tuples, lists, dictionaries and slices."""
    if isinstance(value, Node):
        return of(value)
    if isinstance(value, slice):
        return slice(mapped(value.start, of), mapped(value.stop, of), mapped(value.step, of))
    if isinstance(value, dict):
        return {name: mapped(one, of) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(one, of) for one in value)
    return value


def fixed(value: Any) -> Any:
    """Return a value as the argument of a node: lists and dictionaries as they are now."""
    return mapped(value, lambda node: node)


@dataclass
class Graph:
    """All nodes of one evaluation.

    Attributes:
        lines: lines of source that each node comes from.
        written: those of them where its operation is written.
        names: variables, parameters, attributes and keys that each node was given to, in that order.
        defaults: values that inputs have unless a caller gives others.
        given: what calls give to the parameters of functions, by definition and name.
        facts: what callers say of inputs (`roles.Fact`).
        asked: conditions of branches that ask whether a variable is None: by the place where, which variable, and
            whether it is something if they hold.
        options: constants that a symbol may be: by annotation, or because it is compared with them before anything else
            raises.
    """

    _known: dict[Any, Node] = field(default_factory=dict)
    lines: dict[Node, set[tuple[str, int]]] = field(default_factory=dict)
    written: dict[Node, set[tuple[str, int]]] = field(default_factory=dict)
    names: dict[Node, dict[str, None]] = field(default_factory=dict)
    defaults: dict[Node, Any] = field(default_factory=dict)
    given: dict[tuple[Any, str], dict[Node, None]] = field(default_factory=dict)
    facts: dict[Node, Any] = field(default_factory=dict)
    asked: dict[Node, dict[tuple[str, int], tuple[str, bool]]] = field(default_factory=dict)
    options: dict[Node, list[Any]] = field(default_factory=dict)

    def copy(self) -> "Graph":
        """Return a graph with the same nodes, to which others are added than to this one."""
        lines, written = ({node: set(places) for node, places in each.items()} for each in (self.lines, self.written))
        names = {node: dict(given) for node, given in self.names.items()}
        given = {parameter: dict(values) for parameter, values in self.given.items()}
        asked = {node: dict(places) for node, places in self.asked.items()}
        rest = dict(self.defaults), given, dict(self.facts), asked, dict(self.options)
        return Graph(dict(self._known), lines, written, names, *rest)

    def node(self, operation: str, *arguments: Any, **named: Any) -> Node:
        """Return the node of an operation, the one that is there if it was made before."""
        arguments, sorted_names = fixed(arguments), fixed(tuple(sorted(named.items())))
        key = operation, _key(arguments), _key(sorted_names)
        if key not in self._known:
            self._known[key] = Node(operation, arguments, sorted_names, len(self._known))
        return self._known[key]

    @property
    def nodes(self) -> list[Node]:
        """Return all nodes, in the order in which they were made."""
        return list(self._known.values())

    def users(self) -> dict[Node, list[Node]]:
        """Return the nodes that each node is an argument of."""
        found: dict[Node, list[Node]] = {}
        for node in self._known.values():
            for part in node.parts:
                found.setdefault(part, []).append(node)
        return found

    def named(self, value: Any, name: str) -> None:
        """Remember that a value was given to a variable, parameter, attribute or key."""
        if isinstance(value, Node):
            self.names.setdefault(value, {})[name] = None

    def rewritten(
        self,
        value: Any,
        replace: Callable[[Node], Any] = lambda node: node,
        taken: Callable[[Node], Any] = lambda node: node,
        kept: Callable[[Node], bool] = lambda node: False,
    ) -> Any:
        """Return a value in which other values stand for nodes; what uses them is made anew.

        Args:
            value: a node, or a container of nodes.
            replace: what stands for a node, as it is; the node itself where nothing else does.
            taken: what goes on in the place of a node and is rewritten in turn, as the branch of a choice.
            kept: whether a node stays as it is, with all that it is made of.
        """
        known: dict[Node, Any] = {}

        def of(part: Any) -> Any:
            return mapped(part, known.__getitem__)

        stack = list(nodes_in(value))
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
                continue
            if (other := replace(node)) is not node:
                known[node] = other
                continue
            if kept(node):
                known[node] = node
                continue
            other = taken(node)
            waiting = [one for one in (node.parts if other is node else nodes_in(other)) if one not in known]
            if waiting:
                stack.extend(waiting)
                continue
            known[node] = of(other) if other is not node else self._made_anew(node, of)
            if isinstance(known[node], Node) and (other is node or node.operation == CHOICE):
                self._inherited(known[node], node, lines=other is node)
        return of(value)

    def _made_anew(self, node: Node, of: Callable[[Any], Any]) -> Any:
        arguments, named = of(node.arguments), {name: of(one) for name, one in node.named}
        if tuple(nodes_in((*arguments, *named.values()))) == node.parts:
            return node
        return self.choice(*arguments) if node.operation == CHOICE else self.node(node.operation, *arguments, **named)

    def _inherited(self, made: Node, node: Node, *, lines: bool) -> None:
        """Give what stands for a node its names, and its lines."""
        if made is not node:
            if lines:
                self.lines.setdefault(made, set()).update(self.lines.get(node, ()))
            for name in self.names.get(node, ()):
                self.named(made, name)

    def choice(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """Return what a value is after two branches; containers of one shape are joined entry by entry."""
        then, otherwise = _under(condition, True, then), _under(condition, False, otherwise)
        if then is otherwise or (is_constant(then) and is_constant(otherwise) and _key(then) == _key(otherwise)):
            return then
        if isinstance(then, tuple | list) and type(then) is type(otherwise) and len(then) == len(otherwise):
            return type(then)(self.choice(condition, one, other) for one, other in zip(then, otherwise, strict=True))
        if isinstance(then, dict) and isinstance(otherwise, dict):
            absent = self.node(INPUT, ABSENT)
            names = [*then, *(name for name in otherwise if name not in then)]
            return {name: self.choice(condition, then.get(name, absent), otherwise.get(name, absent)) for name in names}
        return self.node(CHOICE, condition, then, otherwise)


def _under(condition: Any, holds: bool, value: Any) -> Any:
    """Return a value where a condition holds, or does not: choices that this decides are made."""
    while isinstance(condition, Node) and isinstance(value, Node) and value.operation == CHOICE:
        other, then, otherwise = value.arguments
        decided = implied(other, condition, holds) if isinstance(other, Node) else bool(other)
        if decided is None:
            break
        value = fixed(then if decided else otherwise)
    return value


def implied(value: Node, condition: Node, holds: bool) -> bool | None:
    """Return what a condition says of another: the same, its opposite, or another of one symbol."""
    if condition is value:
        return holds
    for negated, other in ((value, condition), (condition, value)):
        if negated.operation == "not" and isinstance(negated.arguments[0], Node):
            inner = negated.arguments[0]
            if negated is value:
                found = implied(inner, condition, holds)
                return None if found is None else not found
            return implied(other, inner, not holds)
    if condition.operation == CHOICE and condition.arguments[2] is False and holds:
        both = (one for one in condition.arguments[:2] if isinstance(one, Node))
        return next((found for one in both if (found := implied(value, one, True)) is not None), None)
    if holds and (found := _with_symbol(value, condition)) is not None:
        return found
    return False if _with_symbol(condition, value) is (not holds) else None


def values_of(condition: Any) -> tuple[Any, list[Any]]:
    """Return the symbol that a condition compares with constants, and those; None and none if it does something else.

    `x == 1 or x == 2` is a choice of the first, where that is true, and of the second.
    """
    if not isinstance(condition, Node):
        return None, []
    if condition.operation == "==" and is_constant(condition.arguments[1]):
        return condition.arguments[0], [condition.arguments[1]]
    if condition.operation == CHOICE and condition.arguments[1] in (True, condition.arguments[0]):
        (one, first), (other, rest) = values_of(condition.arguments[0]), values_of(condition.arguments[2])
        if condition.arguments[2] is False:
            return one, first
        if first and rest and one is other:
            return one, first + rest
    return None, []


def _with_symbol(condition: Node, equality: Node) -> bool | None:
    """Return what a condition is where a symbol equals a constant, None if that says nothing of it."""
    if equality.operation not in ("==", "is") or not is_constant(equality.arguments[1]):
        return None
    symbol, constant = equality.arguments
    found = constant_of(condition.operation, tuple(constant if one is symbol else one for one in condition.arguments))
    return None if found is NotImplemented else bool(found)


def _key(value: Any) -> Any:
    """Return what tells values apart in a table: 1, 1.0 and True differ, and objects are told by what they are."""
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_key, value))
    if isinstance(value, dict):
        return "dict", tuple((_key(name), _key(one)) for name, one in value.items())
    if isinstance(value, slice):
        return "slice", _key((value.start, value.stop, value.step))
    return type(value).__name__, repr(value) if isinstance(value, float) else value


@dataclass(eq=False)
class Scope:
    """Variables of a function or module, and the scope around it."""

    file: str
    variables: dict[str, Any] = field(default_factory=dict)
    outer: "Scope | None" = None

    def find(self, name: str) -> "Scope | None":
        """Return the nearest scope that has a variable."""
        scope: Scope | None = self
        while scope is not None and name not in scope.variables:
            scope = scope.outer
        return scope


@dataclass(eq=False)
class Function:
    """A function of the source: its definition, the scope around it, its class, and the object that it is bound to."""

    definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: "Kind | None" = None
    receiver: Any = None

    @property
    def name(self) -> str:
        """Its name; that of a lambda is its place."""
        return getattr(self.definition, "name", f"<lambda in line {self.definition.lineno}>")


@dataclass(eq=False)
class Partial:
    """A callable with some of its arguments."""

    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(eq=False)
class Kind:
    """A class of the source, with the values of its bases."""

    definition: ast.ClassDef
    entries: dict[str, Any]
    bases: tuple[Any, ...]

    def lookup(self, name: str) -> Any:
        """Return an entry of the class or of a base of the source; None if there is none."""
        return self.entries[name] if name in self.entries else self.of_bases(name)

    def of_bases(self, name: str) -> Any:
        """Return an entry of a base of the source; None if there is none."""
        found = (base.lookup(name) for base in self.bases if isinstance(base, Kind) and base is not self)
        return next((one for one in found if one is not None), None)


@dataclass(eq=False)
class Thing:
    """An object of a class of the source.

    Attributes:
        kind: its class.
        attributes: those that were set.
        symbol: the node of which unknown attributes are read; None for an object that was built, which has no others.
    """

    kind: Kind
    attributes: dict[str, Any] = field(default_factory=dict)
    symbol: Node | None = None


@dataclass(frozen=True)
class External:
    """A name from outside of the source tree, as `torch.nn.functional.kl_div`."""

    path: str


@dataclass(frozen=True)
class Builtin:
    """A function of the evaluator: a built-in of Python, or a method of a container."""

    name: str
    function: Callable[..., Any] = field(compare=False)


@dataclass(frozen=True)
class Stored:
    """A value that a function gives to a name, attribute or key, or what `backward` is called on (named so).

    Attributes:
        name: the name, attribute or key.
        value: what is stored.
        file: where.
        line: where in it.
        function: the function under way.
    """

    name: str
    value: Any
    file: str
    line: int
    function: "Function | None"


@dataclass(eq=False)
class Frame:
    """A call under way: its variables, what is assumed on the path to the present statement, and what was returned."""

    scope: Scope
    function: Function | None = None
    path: list[tuple[Node, bool]] = field(default_factory=list)
    returned: list[tuple[tuple[tuple[Node, bool], ...], Any]] = field(default_factory=list)
    # "" while statements follow each other; else how the present path ended.
    ended: str = ""
