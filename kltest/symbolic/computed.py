"""Evaluation of a graph in torch, from the values of its inputs."""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.symbolic.operations import ATTRIBUTES, FUNCTIONS, OPERATORS
from kltest.symbolic.values import ABSENT, CHOICE, INPUT, Node, carried_along, nodes_in


class UnknownError(KltestError):
    """A node has no value: it was not given, and it is no operation of the table."""

    def __init__(self, node: Any) -> None:
        named = [one for one in node.arguments if isinstance(one, str)][:1] if isinstance(node, Node) else []
        what = node.operation if isinstance(node, Node) else type(node).__name__.lower()
        super().__init__(f"nothing says what {' '.join([what, *named])} is")
        self.node = node


def evaluate(nodes: Iterable[Node], given: Mapping[Node, Any]) -> dict[Node, Any]:
    """Return the values of nodes, from those of the nodes that are given; only what they need is computed.

    Args:
        nodes: the nodes to evaluate.
        given: values of inputs, of opaque nodes, and of conditions that nothing else decides.

    Raises:
        UnknownError: a node that is needed has no value.
    """
    wanted = list(nodes)
    values = dict(given)
    for node in wanted:
        _fill(node, values)
    return {node: values[node] for node in wanted}


def _fill(last: Node, values: dict[Node, Any]) -> None:
    """Compute a node and what it needs, without recursion: a graph may be deeper than the interpreter's stack."""
    stack = [last]
    while stack:
        node = stack[-1]
        missing = [part for part in _needed(node, values) if part not in values]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if node not in values:
            values[node] = _computed(node, values)


def _needed(node: Node, values: Mapping[Node, Any]) -> Iterable[Node]:
    if node in values:
        return ()
    if node.operation == CHOICE:
        condition, then, otherwise = node.arguments
        if isinstance(condition, Node) and condition not in values:
            return (condition,)
        chosen = then if truth(_valued(condition, values)) else otherwise
        return nodes_in(chosen)
    if node.operation in LOOPS:
        return LOOPS[node.operation].needs(node)
    return node.parts


def truth(value: Any) -> bool:
    """Return the truth of a condition's value."""
    return bool(value.item()) if isinstance(value, Tensor) else bool(value)


def _valued(argument: Any, values: Mapping[Node, Any]) -> Any:
    """Return an argument with values in place of nodes, in lists without what is absent and with what is starred."""
    if isinstance(argument, Node):
        return values[argument]
    if isinstance(argument, slice):
        return slice(*(_valued(one, values) for one in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, dict):
        return {name: _valued(one, values) for name, one in argument.items()}
    if isinstance(argument, list | tuple):
        found = [_valued(one, values) for one in argument]
        each = chain.from_iterable(one if isinstance(one, _Entries) else [one] for one in found)
        return type(argument)(one for one in each if not (isinstance(one, str) and one == ABSENT))
    return argument


class _Entries(tuple[Any, ...]):
    """What stands for as many arguments or entries as it has."""


def _computed(node: Node, values: Mapping[Node, Any]) -> Any:
    if node.operation == CHOICE:
        condition, then, otherwise = node.arguments
        return _valued(then if truth(_valued(condition, values)) else otherwise, values)
    if node.operation == INPUT and node.arguments == (ABSENT,):
        return ABSENT
    if node.operation in LOOPS:
        return LOOPS[node.operation].computed(node, values)
    arguments = _valued(node.arguments, values)
    named = {name: _valued(value, values) for name, value in node.named}
    if node.operation in OWN:
        return OWN[node.operation](*arguments, **named)
    if node.operation in OPERATORS:
        return OPERATORS[node.operation](*arguments)
    if node.operation in FUNCTIONS:
        return _called(node.operation, arguments, named)
    if node.operation == "method" and isinstance(arguments[0], str):  # of an option, which is text
        return getattr(arguments[0], arguments[1])(*arguments[2:], **named)
    raise UnknownError(node)


def _called(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    if name in NUMBERS and all(isinstance(one, int | float) for one in arguments):
        return NUMBERS[name](*arguments, **named)
    if name in ("tensor", "detach", "clone") and isinstance(arguments[0], int | float):
        return arguments[0]
    # A method takes the numbers of a shape one by one as well.
    owners: tuple[Any, ...] = (Tensor,) if arguments and isinstance(arguments[0], Tensor) else ()
    owners = (torch.nn.functional, torch, *owners) if name in FUNCTIONAL else (*owners, torch, torch.nn.functional)
    for owner in owners:
        if hasattr(owner, name):
            return getattr(owner, name)(*arguments, **named)
    raise KltestError(f"torch has no {name}")


# Where torch and torch.nn.functional differ under one name.
FUNCTIONAL = frozenset({"kl_div", "cross_entropy", "softmax", "log_softmax", "one_hot", "pad"})
NUMBERS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("exp", "log", "sqrt", "floor", "ceil", "tanh", "expm1", "log1p")},
    "max": max,
    "min": min,
    "abs": abs,
}


def _written(tensor: Tensor, key: Any, value: Any) -> Any:
    changed = tensor.clone() if isinstance(tensor, Tensor) else list(tensor)
    several = isinstance(key, list) and not all(isinstance(one, int) for one in key)
    changed[tuple(key) if several else key] = value
    return changed


def _tensor(value: Any, **_: Any) -> Any:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


# What the evaluator adds to the functions of torch.
OWN: Mapping[str, Callable[..., Any]] = {
    "same": lambda value, *_, **__: value,
    "tensor": _tensor,
    "item": lambda value, key: value[key],
    "attribute": lambda value, name: getattr(_tensor(value), name) if name in ATTRIBUTES else None,
    "written": _written,
    "appended": lambda items, value: [*items, value],
    "list": lambda items: list(items),
    "tuple": lambda items: tuple(items),
    "starred": lambda items: _Entries(items),
    "len": len,
    "range": range,
    "zip": lambda *items, **_: list(zip(*items, strict=False)),
    "enumerate": lambda items, start=0: list(enumerate(items, start)),
    "reversed": lambda items: list(items)[::-1],
    "added up": lambda items, start=0: sum(items, start),
    "masked_fill": lambda value, mask, filling: torch.masked_fill(value, mask.bool(), filling),
    "where": lambda condition, *two, **named: torch.where(condition, *map(_tensor, two), **named),
    "stack": lambda items, dim=0: torch.stack([_tensor(one) for one in items], dim),
    "clamp": lambda value, *two, **named: torch.clamp(_tensor(value), *two, **named),
    "largest": max,
    "smallest": min,
    "int": int,
    "not": lambda value: torch.logical_not(value) if isinstance(value, Tensor) else not value,
    "bool": lambda value: value.bool() if isinstance(value, Tensor) else bool(value),
}


class Loop:
    """`loop(items, element, before, carried, after, place)`: what a variable is after a loop over unknown items.

    `carried` are the inputs that stand for the variables at the start of a pass, `before` what these are at the first
    one, and `after` what they are when it ends; `element` is the input that stands for the item of the pass.
    """

    @staticmethod
    def needs(node: Node) -> Iterable[Node]:
        items, _, before, carried, after, place = node.arguments
        return nodes_in((items, [before[at] for at in carried_along(carried, after, {place})]))

    @staticmethod
    def computed(node: Node, values: Mapping[Node, Any]) -> Any:
        items, element, before, carried, after, place = node.arguments
        places = carried_along(carried, after, {place})
        state = {at: _valued(before[at], values) for at in places}
        for item in _valued(items, values):
            inside = {**values, element: item, **{carried[at]: state[at] for at in places}}
            for part in nodes_in([after[at] for at in places]):
                _fill(part, inside)
            state = {at: _valued(after[at], inside) for at in places}
        return state[place]


class Mapped:
    """`mapped(items, element, value, kept)`: a list of values, one for each item for which all of `kept` are true."""

    @staticmethod
    def needs(node: Node) -> Iterable[Node]:
        return nodes_in(node.arguments[0])

    @staticmethod
    def computed(node: Node, values: Mapping[Node, Any]) -> Any:
        items, element, value, kept = node.arguments
        found = []
        for item in _valued(items, values):
            inside = {**values, element: item}
            for part in nodes_in((kept, value)):
                _fill(part, inside)
            if all(truth(_valued(one, inside)) for one in kept):
                found.append(_valued(value, inside))
        return found


LOOPS: Mapping[str, Any] = {"loop": Loop, "mapped": Mapped}
