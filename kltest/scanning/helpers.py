"""Functions of the tree that go with a lifted term, as they are written into its source."""

import ast
from collections.abc import Callable
from typing import Any

from kltest.scanning.callees import Function
from kltest.scanning.facts import defaults_of
from kltest.scanning.syntax import copied, says_no_gradient

Called = Callable[[ast.expr, Function], str]


class _Helper(ast.NodeTransformer):
    """Put the names of helpers, and the defaults of attributes, into a helper."""

    def __init__(self, function: Function, helper: Called, notes: list[str]) -> None:
        self.function, self.helper, self.notes, self.defaults = function, helper, notes, defaults_of(function)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if name := self.helper(node.func, self.function):
            node.func = ast.Name(name, ast.Load())
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        text = ast.unparse(node)
        if text.startswith("self.") and isinstance(value := self.defaults.get(text), int | float | str):
            self.notes.append(f"{text} keeps its default, {value!r}")
            return ast.Constant(value)
        self.generic_visit(node)
        return node


def bare(name: str, function: Function, helper: Called, notes: list[str]) -> ast.FunctionDef:
    """Return a function under a name, without self, decorators, annotations and docstring.

    `helper` gives the name under which a function that it calls goes with it; what is guessed is added to `notes`.
    """
    made: Any = copied(function.node)
    quiet = any(map(says_no_gradient, made.decorator_list))
    made.name, made.decorator_list, made.returns = name, [], None
    if made.args.args and made.args.args[0].arg in ("self", "cls"):
        del made.args.args[0]
    for inner in ast.walk(made):
        if isinstance(inner, ast.arg):
            inner.annotation = None
    if isinstance(made.body[0], ast.Expr) and isinstance(made.body[0].value, ast.Constant):
        made.body = made.body[1:] or [ast.Pass()]
    if quiet:
        made.body = [ast.With([ast.withitem(ast.parse("torch.no_grad()", mode="eval").body)], made.body)]
    return _Helper(function, helper, notes).visit(made)  # type: ignore[no-any-return]
