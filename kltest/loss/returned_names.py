"""Names of what a loss returns beside the loss, read from its return statements."""

import ast
from collections.abc import Callable, Iterator
from typing import Any

from kltest.loss.callables import definition_of
from kltest.names import says_kl


def returned_names(function: Callable[..., Any], count: int) -> list[str]:
    """Return the names of `count` items that a function returns as a tuple or a list, "" for those without a name.

    Of several return statements the first that says KL counts.
    """
    found, tree = [""] * count, definition_of(function)
    for answer in _returned(tree) if tree else ():
        if isinstance(answer, ast.Tuple | ast.List) and len(answer.elts) == count:
            named = zip(found, map(_name, answer.elts), strict=True)
            found = [new if says_kl(new) and not says_kl(old) else old or new for old, new in named]
    return found


def _returned(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield what the return statements of a function return; for a name, what was assigned to it last."""
    own, assigned = list(_own(tree)), dict[str, ast.expr]()
    for node in own:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
    for node in own:
        if isinstance(node, ast.Return) and node.value is not None:
            yield assigned.get(node.value.id, node.value) if isinstance(node.value, ast.Name) else node.value


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function in their order, without those of functions inside it."""
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield inner
            yield from _own(inner)


def _name(item: ast.AST) -> str:
    """Return the name that an expression has or takes the mean of, "" for a product, a sum and the like."""
    if isinstance(item, ast.Name):
        return item.id
    if isinstance(item, ast.Subscript):
        key = item.slice
        return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else _name(item.value)
    if isinstance(item, ast.Attribute):
        return item.attr if not says_kl(inner := _name(item.value)) else inner
    if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Div):
        return _name(item.left)
    if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Mult):
        sides = _name(item.left), _name(item.right)
        return next((sides[1 - i] for i, side in enumerate(sides) if "mask" in side.lower()), "")
    if isinstance(item, ast.Call):
        owner, called = "", _name(item.func)
        if isinstance(item.func, ast.Attribute):
            owner, called = _name(item.func.value), item.func.attr
        return next(filter(says_kl, (owner, *map(_name, item.args), called)), "" if item.args else owner)
    return ""
