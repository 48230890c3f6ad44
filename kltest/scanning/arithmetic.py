"""Arithmetic on tensors, of which alone lifted code may consist, by a whitelist on the syntax tree.

Names with an underscore in front, attributes of modules beyond the listed functions, imports, strings that are executed
and anything that reaches a file, the network or the system are on no list, so they are refused.
"""

import ast
import re

from kltest.scanning.vocabulary import WORDS


class Dict(ast.Dict):
    """A dictionary of rollout fields that is made for a helper: one of the tree might be changed by whoever gets it."""


_NODES = (
    *(ast.Expression, ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AnnAssign),
    *(ast.AugAssign, ast.Expr, ast.If, ast.IfExp, ast.With, ast.withitem, ast.Pass, ast.Assert, ast.Raise),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Constant, ast.Name, ast.Attribute),
    *(ast.Subscript, ast.Slice, ast.Tuple, ast.List, Dict, ast.Starred, ast.For, ast.ListComp, ast.GeneratorExp),
    *(ast.comprehension, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context, ast.JoinedStr),
    *(ast.FormattedValue, ast.Break, ast.Continue, ast.Lambda, ast.While),
)
MODULES = {
    "torch": "torch",
    "F": "torch.nn.functional",
    "math": "math",
    "np": "numpy",
    "numpy": "numpy",
    "jnp": "jax.numpy",
    "jax": "jax",
}
"""Modules that lifted code may name, and what their names import."""
_FUNCTIONS = WORDS["functions"]
_ATTRIBUTES = WORDS["attributes"]
_BUILTINS = WORDS["builtins"]
_CLASSES = frozenset(
    {
        "ValueError",
        "TypeError",
        "NotImplementedError",
        "RuntimeError",
        "KeyError",
        "AssertionError",
        "None",
        "True",
        "False",
    }
)


def refusal(tree: ast.AST, known: frozenset[str] = frozenset()) -> tuple[str, int]:
    """Return why code is more than arithmetic, naming what was met, and in which line; the empty string if it is none.

    Args:
        tree: the syntax tree of functions, statements or an expression.
        known: names of lifted functions that it may call.
    """
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= _BUILTINS | _CLASSES | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    refused = ((reason, getattr(node, "lineno", 0)) for node in nodes if (reason := _refused(node, bound, known)))
    return next(refused, ("", 0))


def _refused(node: ast.AST, bound: set[str], known: frozenset[str]) -> str:
    if not isinstance(node, _NODES):
        return f"{type(node).__name__.lower()} is no arithmetic"
    if isinstance(node, ast.FunctionDef) and node.decorator_list:
        return f"the decorator of {node.name} is no arithmetic"
    if isinstance(node, ast.Name):
        if node.id.startswith("__"):
            return f"{node.id} is not allowed"
        if not (node.id in bound or node.id in known or node.id in MODULES):
            return f"nothing of a rollout stands for {node.id}"
        if (node.id in MODULES or node.id in _BUILTINS) and not isinstance(node.ctx, ast.Load):
            return f"{node.id} is given another meaning"
    if isinstance(node, ast.arg) and node.arg in MODULES:
        return f"{node.arg} is given another meaning"
    if isinstance(node, ast.Attribute) and not (node.attr in _FUNCTIONS or node.attr in _ATTRIBUTES):
        return f"{ast.unparse(node)[:60]} is not arithmetic that is known"
    if isinstance(node, ast.Call):
        called = node.func
        plain = isinstance(called, ast.Name) and called.id in known
        if isinstance(called, ast.Call) and isinstance(called.func, ast.Attribute) and called.func.attr == "KLDivLoss":
            return ""
        if not plain and not (isinstance(called, ast.Attribute) and called.attr in _FUNCTIONS):
            return f"{ast.unparse(called)[:60]}(…) is not arithmetic that is known"
    if isinstance(node, ast.With) and not all(_is_mode(item.context_expr) for item in node.items):
        return "a with statement of another kind than torch.no_grad()"
    return ""


def _is_mode(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr
        in (
            "no_grad",
            "inference_mode",
            "enable_grad",
        )
    )


def imports(text: str) -> str:
    """Return the imports of the modules that lifted code names."""
    named = {name: module for name, module in MODULES.items() if re.search(rf"\b{name}\.", text)}
    return "".join(f"import {module} as {name}\n" for name, module in named.items())
