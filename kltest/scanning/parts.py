"""The KL terms in what a function returns or stores: additive parts that are zero where two sides agree."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from kltest.scanning.measured import leaves, source_of, vanishes
from kltest.scanning.unfolding import Assumed, Unfolding
from kltest.symbolic.operations import CONDITIONS, words_of
from kltest.symbolic.roles import MOVES, is_carried, parts_of
from kltest.symbolic.values import CHOICE, Graph, Node, nodes_in, walked
from kltest.symbolic.words import POLICY

LINEAR = (
    MOVES
    | words_of(
        """
        mean sum nanmean nansum neg negated masked_fill where nan_to_num cumsum loop mapped written appended
        scatter scatter_add index_add gather take_along_dim choice call method item attribute
        """
    )
) - {"detach"}
SUMS = frozenset({"+", "-", "add", "sub", "added up"})
NEGATIONS = frozenset({"neg", "negated"})
PRODUCTS = frozenset({"*", "mul", "@", "matmul", "bmm"})
LIMITS = frozenset({"max", "min", "maximum", "minimum", "clamp", "largest", "smallest", "fmin", "fmax"})


@dataclass(frozen=True)
class Part:
    """A term in a graph.

    Attributes:
        root: what the term is a part of: a loss, a reward, an advantage.
        at: the node that holds it.
        core: the term itself, which stands for `at` when the others of a sum are left out.
        place: loss, reward or advantage.
        ways: the parts of each node that a term may be an additive part of, from the root down.
    """

    root: Any
    at: Node
    core: Node
    place: str
    ways: Mapping[Node, Mapping[Node, None]] = field(compare=False)

    @cached_property
    def above(self) -> set[Node]:
        """What the term is an additive part of, and its own node."""
        owners: dict[Node, list[Node]] = {}
        for node, parts in self.ways.items():
            for one in parts:
                owners.setdefault(one, []).append(node)
        return set(walked([self.at], lambda one: owners.get(one, ())))

    def holds(self, value: Any) -> bool:
        """Return True for what the term is an additive part of."""
        return any(node in self.above for node in nodes_in(value))


@dataclass
class _Walk:
    """The way through one root: what is still to be looked at, and the parts that were come by."""

    root: Any
    place: str
    stack: list[Node]
    ways: dict[Node, dict[Node, None]] = field(default_factory=dict)
    met: dict[Node, list[tuple[Node, Node]]] = field(default_factory=dict)

    def link(self, node: Node, part: Any) -> None:
        """Remember that a term may be an additive part of a node through one of its parts."""
        for one in nodes_in(part):
            self.ways.setdefault(node, {})[one] = None

    def meet(self, node: Node, part: Node) -> None:
        """Remember the way to an addend or factor; whether it is gone is decided with all of them."""
        self.met[part] = [*self.met.get(node, ()), (node, part)]

    def into(self, parts: Iterable[Node]) -> None:
        """Go on to addends or factors that were met."""
        for part in list(parts):
            for node, inner in self.met[part]:
                self.link(node, inner)
            self.stack.append(part)

    def on(self, node: Node, parts: Iterable[Any]) -> None:
        """Go on to parts of a node."""
        found = list(parts)
        for part in found:
            self.link(node, part)
        for part in reversed(found):  # the first of them is looked at first
            self.stack.extend(nodes_in(part))

    def part(self, at: Node, core: Node) -> Part:
        """Return a term that was found."""
        return Part(self.root, at, core, self.place, self.ways)


TRIED = 6
"""Configurations in which a part may be zero where its sides agree."""


class Parts:
    """Finds the terms of roots in one graph."""

    def __init__(self, unfolding: Unfolding) -> None:
        self.unfolding, self.roles, self.graph = unfolding, unfolding.roles, unfolding.graph
        self._zero: dict[Node, bool] = {}

    def of(self, root: Any, place: str) -> Iterator[Part]:
        """Yield the terms of a loss, reward or advantage."""
        walk = _Walk(root, place, list(nodes_in(root)))
        seen: set[Node] = set()
        while walk.stack:
            node = walk.stack.pop()
            if node in seen:
                continue
            seen.add(node)
            fact = self.roles.of(node)
            if len(fact.sides) < 2 or fact.is_field or node.operation in CONDITIONS:
                continue
            if node.operation in SUMS:
                yield from self._of_sum(node, walk)
            elif node.operation in PRODUCTS:
                yield from self._of_product(node, walk)
            elif node.operation in ("/", "div") and not self.roles.of(node.arguments[1]).sides:
                walk.on(node, node.arguments[:1])
            elif node.operation in ("call", "method"):  # a number that is handed on is a weight, if anything
                walk.on(node, (one for one in node.parts if place != "loss" or one.operation != "detach"))
            elif node.operation in LINEAR or node.operation == "detach":
                walk.on(node, parts_of(node))
            elif not fact.rewarded and self.is_zero(node):
                yield walk.part(node, node)
            elif node.operation in LIMITS:
                walk.on(node, parts_of(node))

    def is_zero(self, node: Node) -> bool:
        """Return True if in some configuration a part is zero where its sides agree."""
        if node not in self._zero:
            self._zero[node] = any(
                isinstance(case.node, Node)
                and len(self.roles.of(case.node).sides) > 1
                and vanishes(self.roles, case.node)
                for case in islice(self.unfolding.cases(node), TRIED)
            )
        return self._zero[node]

    def _of_product(self, node: Node, walk: "_Walk") -> Iterator[Part]:
        own = [one for one in nodes_in(node.arguments) if self.roles.of(one).sides or self.roles.of(one).rewarded]
        if any(_is_zero(one) for one in node.arguments):
            return
        if len(own) == 1:
            walk.on(node, own)
            return
        walk.met = {}
        factors = list(self._factors(node, walk))
        sided = [one for one in factors if self.roles.of(one).sides]
        rewarded = [one for one in factors if self.roles.of(one).rewarded]
        if len({*sided, *rewarded}) == 1:
            walk.into(sided[:1])
        elif not rewarded and (self.is_zero(node) or self._is_weighted(sided)):
            yield walk.part(node, node)
        elif len(factors) > 1:
            for one in rewarded:
                if any(self.carries(other) for other in factors if other is not one):
                    yield from self.of(one, "advantage")
                else:  # a loss that is weighted
                    walk.into([one])

    def _is_weighted(self, factors: Sequence[Node]) -> bool:
        """Return True for a term with weights that carry no gradient, which may be nothing where its sides agree."""
        carrying = [one for one in factors if True in self.roles.flows(one)]
        return len(carrying) == 1 and self.is_zero(carrying[0])

    def carries(self, node: Node) -> bool:
        """Return True for what a gradient of the policy's probabilities flows through."""
        stack = [node]
        for one in stack:
            fact = self.roles.of(one)
            if one.operation == "detach" or POLICY not in fact.sides:
                continue
            if fact.is_field or self.roles.is_unknown(one):
                return True
            stack += [part for part in parts_of(one) if part not in stack]
        return False

    def _factors(self, node: Node, walk: "_Walk") -> Iterator[Node]:
        for one in nodes_in(node.arguments):
            walk.meet(node, one)
            if one.operation in PRODUCTS or one.operation in NEGATIONS:
                yield from self._factors(one, walk)
            else:
                yield one

    def _of_sum(self, node: Node, walk: "_Walk") -> Iterator[Part]:
        walk.met = {}
        addends = list(self._addends(node, walk))
        two = [one for one in addends if len(self.roles.of(one[1]).sides) > 1]
        if not two:
            if not self.roles.of(node).rewarded and self.is_zero(node):
                yield walk.part(node, node)
            return
        rewarded = [one for one in two if self.roles.of(one[1]).rewarded]
        walk.into(one for _, one in rewarded)
        two = [one for one in two if one not in rewarded]
        others = [one for one in addends if one not in two and not self.roles.of(one[1]).rewarded]
        for group in self._groups(two):
            (_, first), *rest = group
            whole = self._descends(first) or self.is_zero(first)
            if not rest and whole and not (others and self._needs(group, others)):
                walk.into([first])
            elif core := self._core(node, group, others, len(addends)):
                yield walk.part(node, core)
            else:
                walk.into(one for _, one in group if self._descends(one))

    def _needs(self, group: Sequence[tuple[int, Any]], others: Sequence[tuple[int, Any]]) -> bool:
        """Return True for a part that is zero where its sides agree only with what is added to it of one of them."""
        sides = self._sides(group)
        own = [one for one in others if self._sides([one]) and self._sides([one]) <= sides]
        if not own or self.is_zero(self._sum(group)):
            return False
        return self.is_zero(self._sum([*group, *own]))

    def _descends(self, node: Node) -> bool:
        return node.operation in LINEAR | PRODUCTS | SUMS or node.operation in ("/", "div", "detach")

    def _core(
        self, node: Node, group: Sequence[tuple[int, Any]], others: Sequence[tuple[int, Any]], all_of_it: int
    ) -> Node | None:
        """Return a group with what else of its sum makes it zero where its sides agree; None if nothing does."""
        sides = self._sides(group)
        own = [one for one in others if self._sides([one]) and self._sides([one]) <= sides]
        constants = [one for one in others if not self._sides([one])]
        for more in ([], constants, own, [*own, *constants]):
            members = [*group, *more]
            core = node if len(members) == all_of_it else self._sum(members)
            if self.is_zero(core):
                self.graph.lines.setdefault(core, set()).update(self.graph.lines.get(node, ()))
                return core
        return None

    def _sides(self, addends: Sequence[tuple[int, Any]]) -> frozenset[str]:
        return frozenset(side for _, one in addends for side in self.roles.of(one).sides)

    def _sum(self, addends: Sequence[tuple[int, Any]]) -> Node:
        total: Any = None
        for sign, one in addends:
            if total is None:
                total = one if sign > 0 else self.graph.node("negated", one)
            else:
                total = self.graph.node("+" if sign > 0 else "-", total, one)
        return total

    def _addends(self, node: Node, walk: "_Walk", sign: int = 1) -> Iterator[tuple[int, Any]]:
        """Yield the addends of a sum with their signs; a sum of two sides alone, as a log-ratio, stays whole."""
        if node.operation == "added up":
            for one in nodes_in(node.arguments[0]):
                walk.meet(node, one)
                yield sign, one
            return
        first, second = node.arguments[:2]
        scale = node.arguments[2:] or [one for name, one in node.named if name == "alpha"]
        minus = node.operation in ("-", "sub")
        for part, its in ((first, sign), (second, -sign if minus else sign)):
            if not isinstance(part, Node):
                yield its, part
                continue
            walk.meet(node, part)
            if part.operation in NEGATIONS and isinstance(part.arguments[0], Node):
                walk.meet(part, part.arguments[0])
                part, its = part.arguments[0], -its
            if part.operation in SUMS and not scale and self._is_open(part):
                yield from self._addends(part, walk, its)
            else:
                yield its, part

    def _is_open(self, node: Node) -> bool:
        return any(len(self.roles.of(one).sides) > 1 for one in nodes_in(node.arguments))

    def _groups(self, addends: Sequence[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
        """Return addends in groups of those that are made of the same probabilities of two sides."""
        groups: list[tuple[dict[Node, str], list[tuple[int, Any]]]] = []
        for one in addends:
            ends = leaves(self.roles, one[1])
            fields = {source_of(node): name[:4] for node, name in ends.fields.items() if "log" in name}
            fields |= {node: "" for node in ends.unknown if self.roles.of(node).sides}
            members = [one]
            for other in list(groups):
                if len({other[0][node] for node in other[0].keys() & fields}) > 1:
                    groups.remove(other)
                    fields |= other[0]
                    members = [*other[1], *members]
            groups.append((fields, members))
        return [members for _, members in groups]


def projected(graph: Graph, part: Part) -> tuple[Any, Assumed]:
    """Return the root of a part without what is added to it elsewhere, and the conditions that hold wherever it is."""
    assumed: dict[tuple[Node, bool], set[Node]] = {}

    def taken(node: Node) -> Any:
        if not part.holds(node):
            return node
        if node.operation in ("+", "-", "add", "sub"):
            first, second = node.arguments[:2]
            if part.holds(first) != part.holds(second) and not (is_carried(first) or is_carried(second)):
                kept = first if part.holds(first) else second
                minus = node.operation in ("-", "sub") and part.holds(second)
                return graph.node("negated", kept) if minus else kept
        if node.operation == "item" and not isinstance(node.arguments[1], str | int):
            entries = _entries(node.arguments[0])
            holding = [at for at, one in enumerate(entries) if part.holds(one)]
            if len(entries) > 1 and len(holding) == 1 and not part.holds(node.arguments[1]):
                # A list of estimators, of which an option is the index.
                assumed.setdefault((graph.node("==", node.arguments[1], holding[0]), True), set()).add(node)
                return entries[holding[0]]
        if node.operation == "loop" and part.holds(node.arguments[4][node.arguments[5]]):
            *rest, before, carried, after, place = node.arguments
            if isinstance(before[place], Node) and not part.holds(before[place]):  # what the loop adds it to
                before = tuple(0.0 if at == place else one for at, one in enumerate(before))
                return graph.node("loop", *rest, before, carried, after, place)
        if node.operation == CHOICE and part.holds(node.arguments[1]) != part.holds(node.arguments[2]):
            branch = part.holds(node.arguments[1])
            if isinstance(node.arguments[0], Node):
                assumed.setdefault((node.arguments[0], branch), set()).add(node)
        return node

    root = graph.rewritten(part.root, lambda node: part.core if node is part.at else node, taken)
    return root, tuple(one for one, choices in assumed.items() if _are_passed(part, choices))


def _are_passed(part: Part, nodes: set[Node]) -> bool:
    """Return True if each way from the root to a term leads through one of some nodes."""

    def onward(one: Node) -> Iterator[Node]:
        return filter(part.holds, () if one in nodes else part.ways.get(one, ()))

    return part.at not in walked(filter(part.holds, nodes_in(part.root)), onward)


def _is_zero(value: Any) -> bool:
    """Return True for the number zero, and a tensor of it."""
    return value.operation == "tensor" and _is_zero(value.arguments[0]) if isinstance(value, Node) else value == 0


def _entries(value: Any) -> list[Any]:
    """Return the entries of a list, or of what stacks one."""
    if isinstance(value, Node):
        return _entries(value.arguments[0]) if value.operation in ("stack", "list", "tuple") else []
    return list(value) if isinstance(value, list | tuple) else []


def sign(part: Part) -> int:
    """Return -1 if a term is subtracted from its root, else 1."""
    found, node = 1, next(one for one in nodes_in(part.root) if part.holds(one))
    while node is not part.at:
        inner = next(one for one in part.ways[node] if part.holds(one))
        subtracted = node.operation in ("-", "sub") and inner is not node.arguments[0]
        multiplies = node.operation in PRODUCTS or node.operation in ("/", "div")
        factors = [one for one in node.arguments if one is not inner] if multiplies else []
        turned = [node.operation in NEGATIONS, subtracted, *map(_is_negative, factors)]
        found *= (-1) ** sum(turned)
        node = inner
    return found


def _is_negative(value: Any) -> bool:
    """Return True for a negative number, for minus what a name stands for, and for a product with one of them."""
    if not isinstance(value, Node):
        return isinstance(value, int | float) and value < 0
    if value.operation in NEGATIONS or value.operation == "detach":
        return _is_negative(value.arguments[0]) != (value.operation in NEGATIONS)
    return value.operation in PRODUCTS and sum(map(_is_negative, value.arguments)) % 2 == 1
