"""Choices of a part of a graph, unfolded: one graph without choices for each configuration that changes it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kltest.scanning.measured import FAILURES, LOOPING, Rollouts, field_of, filled, is_settled, leaves, value_of
from kltest.symbolic.operations import OPERATORS, constant_of, is_constant
from kltest.symbolic.roles import MASK, PADDING, TOKEN, Roles, own_name
from kltest.symbolic.values import CHOICE, INPUT, Node, implied, nodes_in, values_of

MOST = 48
"""Configurations that are unfolded of one part."""
DEEPEST = 3
"""Calls inside of calls that are written of a condition."""
OPTIONS = frozenset({INPUT, "attribute", "item"})
"""Operations that read an option."""
COMPARED = frozenset({"==", "<", "<=", ">", ">=", "in", "is"})


Assumed = tuple[tuple[Node, bool], ...]


@dataclass
class Case:
    """One configuration: what holds in it, and the part as it is then.

    Attributes:
        assumed: conditions that were chosen, in that order, and whether they hold.
        node: the part without choices.
        others: what is assumed of later configurations in which the part is the same.
    """

    assumed: Assumed
    node: Any
    others: list[Assumed] = field(default_factory=list)


def excluded(one: Assumed, other: Assumed) -> bool:
    """Return True for two configurations of which only one can be."""
    return any(implied(condition, known, held) is (not holds) for condition, holds in one for known, held in other)


class Unfolding:
    """Unfolds parts of one graph; remembers what conditions are decided by themselves."""

    def __init__(self, roles: Roles) -> None:
        self.roles, self.graph = roles, roles.graph
        self._decided: dict[Node, bool | None] = {}
        self._free: dict[Node, bool] = {}

    def cases(self, value: Any, assumed: Assumed = ()) -> Iterator[Case]:
        """Yield the configurations of a part in which something holds, each once; at most `MOST` conditions are tried.

        The condition of an outer choice is decided before those in its branches.
        """
        seen: dict[Any, Case] = {}
        waiting = [_Path(self, assumed)]
        for _ in range(MOST * 4):
            if not waiting:
                return
            path = waiting.pop()
            if (condition := path.open_in(value)) is not None:
                waiting += filter(_Path.is_possible, (path.with_(condition, holds) for holds in (False, True)))
                continue
            node = path.of(value)
            key = self.graph.node("same", node)
            if key in seen:
                seen[key].others.append(path.assumed)
            else:
                seen[key] = Case(path.assumed, node)
                yield seen[key]

    def is_free(self, node: Node) -> bool:
        """Return True for what no choice changes: there is none in it, or none that matters."""
        stack = [node]
        while stack:
            one = stack[-1]
            if one in self._free:
                stack.pop()
            elif one.operation == CHOICE:
                self._free[one] = self._is_end(one)
            elif waiting := [part for part in _told_parts(one) if part not in self._free]:
                stack.extend(waiting)
            else:
                self._free[one] = all(self._free[part] for part in _told_parts(one)) or self._is_end(one)
        return self._free[node]

    def _is_end(self, node: Node) -> bool:
        """Return True for a field that is one whatever its choices, and for a number that is not known."""
        if field_of(self.roles, node):
            return is_settled(self.roles, node)
        return node.operation != CHOICE and self.roles.is_unknown(node) and not self.roles.of(node).is_field

    def decided(self, condition: Node) -> bool | None:
        """Return what a condition is whatever the configuration: of what rollouts have, and of coefficients."""
        if condition not in self._decided:
            self._decided[condition] = self._decide(condition)
        return self._decided[condition]

    def is_impossible(self, condition: Node) -> bool:
        """Return True for an option that would have another value than it may have."""
        symbol, values = values_of(condition)
        options = self.graph.options.get(symbol) if values else None
        return options is not None and not any(one in options for one in values)

    def _decide(self, condition: Node) -> bool | None:
        fact = self.roles.of(condition)
        if self.is_impossible(condition):
            return False
        # An option may have "mask" or "token" in its name, and no tensor of more than one entry is true or false.
        if condition.operation in OPTIONS and fact.quantity in (MASK, PADDING, TOKEN):
            return None
        if fact.is_field or fact.quantity in (MASK, PADDING):
            return True
        if condition.operation == "is" and condition.arguments[1] is None:
            inner = self.roles.of(condition.arguments[0])
            return False if inner.is_field or inner.quantity in (MASK, PADDING, TOKEN) else None
        if condition.operation == "call" and condition.arguments[0] == "isinstance":
            value, kind = condition.arguments[1:]
            named = isinstance(kind, str) and isinstance(value, Node) and self.roles.of(value).sides
            return "Tensor" in kind if named else None
        ends = leaves(self.roles, condition)
        if ends.fields and not ends.unknown:
            try:
                return bool(value_of(filled(self.roles, condition, {}), Rollouts(3)) != 0)
            except FAILURES:
                return None
        return None


class _Path:
    """What holds in one configuration."""

    def __init__(self, unfolding: Unfolding, assumed: Assumed) -> None:
        self.unfolding, self.graph, self.assumed = unfolding, unfolding.graph, assumed
        self._known: dict[Node, bool | Node] = {}
        self._left: frozenset[Node] = frozenset()
        """Conditions of which all assumptions but the last say nothing."""

    def with_(self, condition: Node, holds: bool) -> "_Path":
        """Return the path on which one more condition is decided."""
        path = _Path(self.unfolding, (*self.assumed, (condition, holds)))
        path._known = {one: known for one, known in self._known.items() if isinstance(known, bool)}
        path._left = frozenset(one for one, known in self._known.items() if known is one)
        return path

    def open_in(self, value: Any) -> Node | None:
        """Return the first condition of a choice in a value that is not decided."""
        seen: set[Node] = set()
        stack = list(nodes_in(value))
        while stack:
            node = stack.pop()
            if node in seen or self.unfolding.is_free(node):
                continue
            seen.add(node)
            if node.operation != CHOICE:
                stack.extend(_told_parts(node))
                continue
            holds = self.holds(node.arguments[0])
            if isinstance(holds, Node):
                return holds
            stack.extend(nodes_in(node.arguments[1 if holds else 2]))
        return None

    def of(self, value: Any) -> Any:
        """Return a value, all of whose conditions are decided, without choices."""

        def taken(node: Node) -> Any:
            holds = self.holds(node.arguments[0]) if node.operation == CHOICE else node
            return node if isinstance(holds, Node) else node.arguments[1 if holds else 2]

        return self.graph.rewritten(value, taken=taken, kept=self.unfolding.is_free)

    def holds(self, condition: Any) -> bool | Node:
        """Return whether a condition holds; if that is open, the part of it that is to be decided first."""
        if not isinstance(condition, Node):
            return bool(condition)
        if condition not in self._known:
            self._known[condition] = self._of_condition(condition)
        return self._known[condition]

    def is_possible(self) -> bool:
        """Return False if the parts of a condition that was assumed say the opposite by now."""
        made = ((self._of_parts(one), holds) for one, holds in self.assumed if one.operation in (CHOICE, "not"))
        return all(isinstance(found, Node) or found is holds for found, holds in made)

    def _of_parts(self, condition: Node) -> bool | Node:
        first, *branches = condition.arguments
        holds = self.holds(first)
        if isinstance(holds, Node):
            return holds
        return self.holds(branches[0 if holds else 1]) if branches else not holds

    def _of_condition(self, condition: Node) -> bool | Node:
        for other, held in self.assumed[-1:] if condition in self._left else reversed(self.assumed):
            if (found := implied(condition, other, held)) is not None:
                return found
        if condition.operation in (CHOICE, "not"):
            return self._of_parts(condition)
        if (decided := self.unfolding.decided(condition)) is not None:
            return decided
        if not (condition.operation in OPERATORS and all(map(_may_be_constant, condition.arguments))):
            return condition
        if (inner := self.open_in(condition.parts)) is not None:
            return inner
        made = self.of(condition)
        if (known := constant_of(made.operation, made.arguments)) is not NotImplemented:
            return bool(known)
        return condition if made is condition else self.holds(made)


def _told_parts(node: Node) -> Iterable[Node]:
    """Return the parts of a node whose choices are told: of a loop, not those of what it runs over."""
    if node.operation in LOOPING:
        return nodes_in(node.arguments[1:])
    return () if node.operation == INPUT else node.parts


def _may_be_constant(value: Any) -> bool:
    """Return True for a constant, and for what is one in some configuration."""
    if isinstance(value, Node) and value.operation == CHOICE:
        return any(map(_may_be_constant, value.arguments[1:]))
    return is_constant(value)


def text(value: Any, depth: int = DEEPEST) -> str:
    """Return a value in words of the code; what is deeper than `depth` calls is left out."""
    if not isinstance(value, Node):
        return repr(value) if is_constant(value) else getattr(value, "name", "…")
    if depth == 0:
        return own_name(value) or "…"
    match value.operation, value.arguments:
        case "input", (name, *_):
            return str(name)
        case "attribute", (_, name):
            return str(name)
        case "item", (_, str(key)):
            return key
        case "item", (owner, key) if is_constant(key):
            return f"{text(owner, depth - 1)}[{key}]"
        case "not", (inner,):
            return f"not {text(inner, depth)}"
        case "choice", (one, True, False):
            return text(one, depth)
        case "choice", (one, then, other) if then is True or then is one:
            return f"{text(one, depth)} or {text(other, depth)}"
        case "choice", (one, other, otherwise) if otherwise is False or otherwise is one:
            return f"{text(one, depth)} and {text(other, depth)}"
        case operation, (one, other) if operation in COMPARED:
            sign = "=" if operation == "==" else f" {operation} "
            return f"{text(one, depth - 1)}{sign}{text(other, depth - 1)}"
        case "call", (str(name), *rest):
            return f"{name}({', '.join(text(one, depth - 1) for one in rest)})"
        case "method", (owner, name, *rest):
            return f"{text(owner, depth - 1)}.{name}({', '.join(text(one, depth - 1) for one in rest)})"
        case operation, parts:
            return f"{operation}({', '.join(text(one, depth - 1) for one in parts)})"
