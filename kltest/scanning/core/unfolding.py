"""Choices of a part of a graph, unfolded: one graph without choices for each configuration that changes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kltest.scanning.core.measured import FAILURES, Rollouts, field_of, filled, leaves, value_of
from kltest.symbolic.roles import MASK, PADDING, TOKEN, Roles, own_name
from kltest.symbolic.values import CHOICE, Node, implied, is_constant, nodes_in, reached
from kltest.symbolic.words import POLICY

MOST = 48
"""Configurations that are unfolded of one part."""
DEEPEST = 3
"""Calls inside of calls that are written of a condition."""
COMPARED = frozenset({"==", "<", "<=", ">", ">=", "in", "is"})


@dataclass
class Case:
    """One configuration: what holds in it, and the part as it is then.

    Attributes:
        assumed: conditions that were chosen, in that order, and whether they hold.
        node: the part without choices.
    """

    assumed: tuple[tuple[Node, bool], ...]
    node: Any


class Unfolding:
    """Unfolds parts of one graph; remembers what conditions are decided by themselves."""

    def __init__(self, roles: Roles) -> None:
        self.roles, self.graph = roles, roles.graph
        self._decided: dict[Node, bool | None] = {}
        self._settled: dict[Node, bool] = {}

    def cases(self, value: Any) -> Iterator[Case]:
        """Yield the configurations of a part, each once; those after `MOST` tries are not unfolded."""
        seen: set[Any] = set()
        waiting: list[Case] = [Case((), value)]
        for _ in range(MOST * 4):
            if not waiting:
                return
            case = waiting.pop()
            condition = next(self._conditions(case.node), None)
            if condition is None:
                key = self.graph.node("same", case.node)
                if key not in seen:
                    seen.add(key)
                    yield case
                continue
            decided = self.decided(condition)
            for holds in (False, True) if decided is None else (decided,):
                assumed = case.assumed if decided is not None else (*case.assumed, (condition, holds))
                waiting.append(Case(assumed, self.under(case.node, condition, holds)))

    def under(self, value: Any, condition: Node, holds: bool) -> Any:
        """Return a value where a condition holds, or does not."""

        def chosen(node: Node) -> Any:
            if self._is_end(node):
                return node
            names = self.graph.names.get(node, ())
            found = taken(node)
            for name in names if found is not node else ():
                self.graph.named(found, name)  # as the choice was called, what is chosen is called
            return found

        def taken(node: Node) -> Any:
            while isinstance(node, Node) and node.operation == CHOICE:
                other = node.arguments[0]
                known = implied(other, condition, holds) if isinstance(other, Node) else bool(other)
                if known is None:
                    break
                node = node.arguments[1 if known else 2]
                if isinstance(node, Node) and node.operation != CHOICE:
                    return self.graph.rewritten(node, chosen, self.is_settled)
                if not isinstance(node, Node):
                    return self.graph.rewritten(node, chosen, self.is_settled)
            if node is condition:
                return holds
            return node

        return self.graph.rewritten(value, chosen, self.is_settled)

    def _conditions(self, value: Any) -> Iterator[Node]:
        """Yield the conditions of choices in a value above its ends, those of outer choices first."""
        seen: set[Node] = set()
        stack = list(nodes_in(value))
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if self.is_settled(node):
                continue
            if node.operation == CHOICE:
                yield from self._atoms(node.arguments[0])
            if not self._is_end(node):
                stack.extend(node.parts)

    def _is_end(self, node: Node) -> bool:
        """Return True for a number that is not known: what is below it changes nothing of a term."""
        return node.operation != CHOICE and self.roles.is_unknown(node) and not self.roles.of(node).is_field

    def is_settled(self, node: Node) -> bool:
        """Return True for a field that is one whatever its choices: it is never detached, or nothing asks that."""
        if node not in self._settled:
            fact = self.roles.of(node)
            field = fact.is_field and field_of(self.roles, node) != ""
            free = field and (fact.who != POLICY or not any(one.operation == "detach" for one in reached(node)))
            self._settled[node] = free
        return self._settled[node]

    def _atoms(self, condition: Any) -> Iterator[Node]:
        """Yield the parts of a condition that are decided one by one: of `a and b`, a and b."""
        if not isinstance(condition, Node):
            return
        if condition.operation == CHOICE:
            for one in condition.arguments:
                yield from self._atoms(one)
        elif condition.operation == "not":
            yield from self._atoms(condition.arguments[0])
        else:
            yield condition

    def decided(self, condition: Node) -> bool | None:
        """Return what a condition is whatever the configuration: of what rollouts have, and of coefficients."""
        if condition not in self._decided:
            self._decided[condition] = self._decide(condition)
        return self._decided[condition]

    def _decide(self, condition: Node) -> bool | None:
        fact = self.roles.of(condition)
        if self.roles.of(condition).is_field or fact.quantity in (MASK, PADDING):
            return True
        if condition.operation == "is" and condition.arguments[1] is None:
            inner = self.roles.of(condition.arguments[0])
            return False if inner.is_field or inner.quantity in (MASK, PADDING, TOKEN) else None
        ends = leaves(self.roles, condition)
        if ends.fields and not ends.unknown:
            try:
                return bool(value_of(filled(self.roles, condition, {}), Rollouts(3)) != 0)
            except FAILURES:
                return None
        return None


def text(value: Any, depth: int = DEEPEST) -> str:
    """Return a value in words of the code; what is deeper than `depth` calls is left out."""
    if not isinstance(value, Node):
        return "…" if any(True for _ in nodes_in(value)) else repr(value)
    if depth == 0:
        return own_name(value) or "…"
    match value.operation, value.arguments:
        case "input", (name, *_):
            return str(name)
        case "attribute", (_, name):
            return str(name)
        case "item", (_, key) if is_constant(key):
            return str(key)
        case "not", (inner,):
            return f"not {text(inner, depth)}"
        case operation, (one, other) if operation in COMPARED:
            sign = "=" if operation == "==" else f" {operation} "
            return f"{text(one, depth - 1)}{sign}{text(other, depth - 1)}"
        case "call", (str(name), *rest):
            return f"{name}({', '.join(text(one, depth - 1) for one in rest)})"
        case "method", (owner, name, *rest):
            return f"{text(owner, depth - 1)}.{name}({', '.join(text(one, depth - 1) for one in rest)})"
        case operation, parts:
            return f"{operation}({', '.join(text(one, depth - 1) for one in parts)})"
