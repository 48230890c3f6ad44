"""Reading syntax trees: names, chains of names, loops over several things at once."""

import ast
from contextlib import suppress
from functools import lru_cache
from typing import Any

from kltest.symbolic.words import words

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
NUMBERS = frozenset({"item", "tolist"})
"""Methods that make numbers of a tensor, which are only logged."""
text = lru_cache(maxsize=100_000)(ast.unparse)
"""The code of a node that nobody changes."""


def copied(node: Any) -> Any:
    """Return a copy of a syntax tree, or of a list of them, some ten times as fast as `copy.deepcopy`."""
    if isinstance(node, list):
        return [copied(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    made = node.__class__.__new__(node.__class__)
    made.__dict__.update((name, copied(value)) for name, value in node.__dict__.items())
    return made


def names_in(*nodes: ast.AST) -> set[str]:
    """Return the names that syntax trees hold."""
    return {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def parameters(function: FunctionNode) -> list[str]:
    """Return the names of a function's parameters, without self."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[names[:1] in (["self"], ["cls"]) :]


def defaults(given: ast.arguments) -> dict[str, Any]:
    """Return the defaults of parameters that are constants, tuples and lists of them included."""
    positional = [*given.posonlyargs, *given.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = []
    pairs += zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True)
    pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found = {}
    for name, value in pairs:
        with suppress(ValueError, TypeError):
            if value is not None:
                found[name.arg] = ast.literal_eval(value)
    return found


def mentioned(node: ast.AST) -> frozenset[str]:
    """Return the names and attributes that a syntax tree mentions."""
    return frozenset(
        getattr(inner, "attr", getattr(inner, "id", ""))
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name | ast.Attribute)
    )


def chain(node: ast.AST) -> str:
    """Return the identifiers and constant keys of a chain of attributes and subscripts, `batch.ref["logits"]` as
    batch.ref.logits; the empty string if it begins with anything but a name."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                parts.append(node.slice.value)
            node = node.value
        elif isinstance(node, ast.Name):
            return ".".join([node.id, *reversed(parts)])
        else:
            return ""


def identifiers(node: ast.AST) -> list[str]:
    found: list[str] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found += [*words(inner.id), inner.id]
        elif isinstance(inner, ast.Attribute):
            found += [*words(inner.attr), inner.attr]
    return found


def each_of(target: ast.expr, iterated: ast.expr) -> dict[str, ast.expr]:
    """Return what the variables of a loop stand for if all rollouts are one tensor: through zip and enumerate, what
    is iterated."""
    called = iterated.func.id if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) else ""
    if isinstance(iterated, ast.Call) and isinstance(target, ast.Tuple) and called in ("enumerate", "zip"):
        pairs = zip(target.elts[called == "enumerate" :], iterated.args, strict=False)
        return {name: value for one, other in pairs for name, value in each_of(one, other).items()}
    return {target.id: iterated} if isinstance(target, ast.Name) and called != "range" else {}


def says_no_gradient(node: ast.expr) -> bool:
    """Return True for `torch.no_grad()` and `torch.inference_mode()`."""
    return any(part in ("no_grad", "inference_mode") for part in identifiers(node))


def is_logged(value: ast.expr) -> bool:
    """Return True for what is no tensor with a gradient any more, as `loss.detach()` is."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr in ("detach", "item", "tolist", "numpy", "stop_gradient"):
            return True
        value = value.func.value
    return False


def shifts(node: ast.expr) -> bool:
    """Return True for slices that align predictions with tokens: [:, :-1], [:, 1:], [:, -n:]."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    parts = [each for each in parts if not (isinstance(each, ast.Constant) and each.value is ...)]
    slices = [each for each in parts if isinstance(each, ast.Slice)]
    return bool(slices) and len(slices) == len(parts) and any(s.lower or s.upper for s in slices)


class Named(ast.NodeTransformer):
    """Put expressions in place of names."""

    def __init__(self, meant: dict[str, ast.expr]) -> None:
        self.meant = meant

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copied(self.meant.get(node.id, node))
