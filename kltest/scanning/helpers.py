"""Functions of the tree that go with a lifted term, as they are written into its source."""

import ast
from collections.abc import Callable, Set
from typing import Any

from kltest.scanning.arithmetic import Dict
from kltest.scanning.callees import Function
from kltest.scanning.conditions import number_for
from kltest.scanning.facts import defaults_of
from kltest.scanning.syntax import chain, copied, says_no_gradient
from kltest.symbolic.words import words

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
        if text.startswith("self.") and number_for(words(node.attr)) == "1":
            self.notes.append(f"{text} is taken to be 1")
            return ast.Constant(1)
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


def hand_over(
    call: ast.Call,
    function: Function,
    stands_for: Callable[[str, str], ast.expr | None],
    known: Set[str],
    notes: list[str],
) -> None:
    """Give a helper its defaults for options that nothing stands for, and a dictionary of what it reads of a batch."""
    defaults = defaults_of(function)
    made: dict[str, ast.expr] = {}
    for name, value in function.given(call).items():
        text = ast.unparse(value)
        if chain(value) != text or text.split(".")[0] in known or stands_for(text, text):
            continue
        if name in defaults and text.startswith(("self.", "args.", "config.", "cfg.")):
            notes.append(f"{text} keeps the default of {name}, {defaults[name]!r}")
            made[text] = ast.Constant(defaults[name])
        elif keys := [key for node in ast.walk(function.node) if (key := _key_of(node, name))]:
            items = {key: item for key in keys if (item := stands_for(key, f"{text}[{key!r}]"))}
            if items.keys() == set(keys):
                made[text] = Dict([ast.Constant(key) for key in items], [*items.values()])
    call.args = [made.get(ast.unparse(each), each) for each in call.args]
    call.keywords = [ast.keyword(each.arg, made.get(ast.unparse(each.value), each.value)) for each in call.keywords]


def _key_of(node: ast.AST, name: str) -> str:
    """Return the key under which something is read of a dictionary; the empty string if nothing is."""
    match node:
        case ast.Subscript(ast.Name(holder), ast.Constant(str() as key)) if holder == name:
            return key
    return ""
