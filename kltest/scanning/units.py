"""Log-probs of tokens or of whole rollouts: what a function adds up or averages before it calls it log-probs."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from kltest.scanning.arithmetic import MODULES
from kltest.scanning.callees import Callees, Function
from kltest.scanning.sides import side
from kltest.scanning.syntax import FUNCTIONS, chain, defaults, each_of
from kltest.symbolic.words import is_mask, says, words

FULL, TOKENS, SUM, MEAN, SAID, GUESSED = "full", "tokens", "sum", "mean", "said", "guessed"
"""Log-probs of every token of the vocabulary, of the tokens that were sampled, and their sum or mean in a rollout; what
is only said to be that of a sequence by its name; and what is called log-probs, of which nothing else is known."""
Found = frozenset[str]
"""Units of an expression: none if nothing is known, several if they depend on the configuration."""
_NONE: Found = frozenset()
_PICKS = frozenset({"gather", "take_along_axis", "take_along_dim", "log_prob"})
_KEEPING = frozenset({"stack", "cat", "concat", "concatenate", "tensor", "as_tensor", "array", "asarray"})
DEEP = 4
"""Calls that are looked into, one in the other."""


class Units:
    """Finds units in the functions of a tree."""

    def __init__(self, tree: Callees) -> None:
        self.tree = tree
        self._values: dict[Function, dict[str, list[ast.expr]]] = {}
        self._calls: dict[Function, list[tuple[Function, ast.Call]]] = {}

    def of(self, node: ast.expr, function: Function) -> Found:
        """Return the units of an expression of a function, whose parameters are what its callers hand in."""
        return _Scope(self, function).of(node)

    def values(self, function: Function) -> dict[str, list[ast.expr]]:
        """Return what each name of a function is assigned, what is appended to it, and what it iterates over."""
        if function not in self._values:
            self._values[function] = found = {}  # type: ignore[var-annotated]
            for name, value in _bound(function.node):
                found.setdefault(name, []).append(value)
        return self._values[function]

    @cached_property
    def _by_name(self) -> dict[str, list[tuple[Function, ast.Call]]]:
        """Calls of the tree by the name that is called, with the functions in which they stand."""
        found: dict[str, list[tuple[Function, ast.Call]]] = {}
        for caller in self.tree.functions:
            for node in ast.walk(caller.node):
                if isinstance(node, ast.Call):
                    found.setdefault(chain(node.func).rsplit(".", 1)[-1], []).append((caller, node))
        return found

    def calls(self, function: Function) -> list[tuple[Function, ast.Call]]:
        """Return the calls of a function in the tree, with the functions in which they stand."""
        if function not in self._calls:
            innermost: dict[ast.Call, Function] = {}
            for caller, node in self._by_name.get(function.name, ()):
                if f"{function.name}(" in caller.source.text and function in self.tree.callees(node.func, caller):
                    innermost[node] = min(caller, innermost.get(node, caller), key=_lines)
            self._calls[function] = [(caller, node) for node, caller in innermost.items() if caller is not function]
        return self._calls[function]


class _Scope:
    """A function as `caller` calls it with the arguments `given`; as anybody may without a caller."""

    def __init__(
        self,
        units: Units,
        function: Function,
        depth: int = 0,
        caller: "_Scope | None" = None,
        given: Mapping[str, ast.expr] = MappingProxyType({}),
    ) -> None:
        self.units, self.function, self.depth, self.caller, self.given = units, function, depth, caller, given
        self.known: dict[str, Found] = {}
        self.constants = (
            {}
            if isinstance(function.node, ast.Module) or caller is None
            else {
                **defaults(function.node.args),
                **{name: value.value if isinstance(value, ast.Constant) else ... for name, value in given.items()},
            }
        )

    def of(self, node: ast.expr | None) -> Found:
        match node:
            case ast.Name(name):
                return self._of_name(name)
            case ast.Attribute(_, name):  # that of a model is the mean of the negative log-probs
                return frozenset({MEAN}) if name == "loss" else _said(name)
            case ast.BinOp(left, op, right):
                found = self.of(left)
                if isinstance(op, ast.Div):
                    return frozenset({MEAN}) if found and found <= {SUM, SAID} and _counts(right) else found
                if found == {MEAN} and isinstance(op, ast.Mult) and _counts(right):
                    return frozenset({SUM})
                found |= self.of(right)
                return frozenset({FULL}) if FULL in found and isinstance(op, ast.Mult | ast.MatMult) else found
            case ast.UnaryOp(_, value) | ast.Starred(value) | ast.Await(value):
                return self.of(value)
            case ast.ListComp(value) | ast.GeneratorExp(value):
                return self.of(value)
            case ast.IfExp(test, one, other):
                taken = _decided(test, self.constants)
                return self._of_any([one] * (taken is not False) + [other] * (taken is not True))
            case ast.List(parts) | ast.Tuple(parts):
                return self._of_any(parts)
            case ast.Subscript(ast.Call() as call, ast.Constant(int(number))):
                return self._of_call(call, number)
            case ast.Subscript(value, index):
                found = self.of(value) or _said(chain(node))
                picked = isinstance(index, ast.Tuple) and sum(not isinstance(e, ast.Slice) for e in index.elts) > 1
                return frozenset({TOKENS}) if picked and FULL in found else found
            case ast.Call():
                return self._of_call(node)
        return _NONE

    def _of_any(self, nodes: Iterable[ast.expr]) -> Found:
        return frozenset().union(*map(self.of, nodes))

    def _of_name(self, name: str) -> Found:
        if name not in self.known:
            self.known[name] = _NONE  # for what it is computed from itself
            found = self._of_any(self.units.values(self.function).get(name, ()))
            if not found and name in self.function.parameters:
                found = self._handed(name)
            self.known[name] = found or _said(name)
        return self.known[name]

    def _handed(self, name: str) -> Found:
        """Return the units of a parameter: of what it is given, or of what the callers of the function give."""
        if self.caller is not None:
            return self.caller.of(self.given.get(name))
        if self.depth > DEEP:
            return _NONE
        calls = [
            (_Scope(self.units, caller, self.depth + 1), self.function.given(call).get(name))
            for caller, call in self.units.calls(self.function)
        ]
        return frozenset().union(*(scope.of(value) for scope, value in calls))

    def _of_call(self, node: ast.Call, number: int = 0) -> Found:
        called, given = node.func, [*node.args, *(each.value for each in node.keywords)]
        if isinstance(called, ast.Call) and chain(called.func).endswith("map") and called.args:
            called = called.args[0]  # vmap(f)(x)
        name = chain(called).rsplit(".", 1)[-1] or getattr(called, "attr", "")
        method = isinstance(called, ast.Attribute) and chain(called.value) not in MODULES
        first = called.value if method and isinstance(called, ast.Attribute) else next(iter(given), None)
        if name in _PICKS:
            return frozenset({TOKENS})
        if name in ("sum", "nansum", "mean", "nanmean"):
            found = self.of(first)
            if FULL in found:
                return frozenset({TOKENS})
            return frozenset({SUM if "sum" in name else MEAN}) if found and found <= {TOKENS, SAID, GUESSED} else _NONE
        if name == "log_softmax" or name == "logits":
            return frozenset({FULL})
        if name == "cross_entropy":
            how = next((ast.unparse(each.value) for each in node.keywords if each.arg == "reduction"), "'mean'")
            return frozenset({{"'none'": TOKENS, "'sum'": SUM}.get(how, MEAN)})
        if name == "where":
            return self._of_any(given[1:])
        if callees := [each for each in self.units.tree.callees(called, self.function) if each is not self.function]:
            return self._returned(callees[0], node, number) or _said(name)
        return (self.of(first) if first is not None and (method or name in _KEEPING) else _NONE) or _said(name)

    def _returned(self, callee: Function, call: ast.Call, number: int) -> Found:
        if self.depth > DEEP or isinstance(callee.node, ast.Module):
            return _NONE
        scope = _Scope(self.units, callee, self.depth + 1, self, callee.given(call))
        found = _NONE
        for value in _returns(callee.node.body, scope.constants):
            if isinstance(value, ast.Tuple) and number < len(value.elts):
                value = value.elts[number]
            found |= scope.of(value)
        return found


def _lines(function: Function) -> tuple[bool, int]:
    return isinstance(function.node, ast.Module), function.last - function.line


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with what they stand for."""
    for inner in ast.walk(node):
        match inner:
            case ast.Assign([target], value):
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for number, part in enumerate(parts):
                    if isinstance(part, ast.Name):
                        whole = part is target
                        written = value.elts if isinstance(value, ast.Tuple) else []
                        yield (
                            part.id,
                            value
                            if whole
                            else written[number]
                            if len(written) == len(parts)
                            else (ast.Subscript(value, ast.Constant(number), ast.Load())),
                        )
            case ast.AnnAssign(ast.Name(name), _, ast.expr() as value) | ast.NamedExpr(ast.Name(name), value):
                yield name, value
            case ast.Call(ast.Attribute(ast.Name(name), "append" | "extend"), [value]):
                yield name, value
            case ast.For(target, value) | ast.comprehension(target, value):
                yield from each_of(target, value).items()


def _returns(statements: Iterable[ast.stmt], constants: Mapping[str, Any]) -> Iterator[ast.expr]:
    """Yield what is returned, for constant values of the parameters; an ellipsis is one that is not known."""
    for node in statements:
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif isinstance(node, ast.If):
            taken = _decided(node.test, constants)
            for branch in [node.body] * (taken is not False) + [node.orelse] * (taken is not True):
                yield from _returns(branch, constants)
                if taken is not None and any(isinstance(each, ast.Return) for each in branch):
                    return
        elif not isinstance(node, FUNCTIONS):
            for name in ("body", "orelse", "finalbody"):
                yield from _returns([e for e in getattr(node, name, ()) if isinstance(e, ast.stmt)], constants)


def _decided(test: ast.expr, constants: Mapping[str, Any]) -> bool | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _decided(test.operand, constants)
        return None if inner is None else not inner
    value = constants.get(getattr(test, "id", ""), ...)
    return None if value is ... else bool(value)


def _counts(node: ast.expr) -> bool:
    """Return True for a number of tokens: of a mask, or of a length."""
    return any(
        is_mask(chain(inner)) or says(chain(inner), "len", "count", "num", "size", "numel")
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript)
    )


def _said(name: str) -> Found:
    """Return the unit that a name states."""
    stated, found = side(name), words(name.rsplit(".", 1)[-1])
    if stated is None or stated.quantity == "prob":
        return _NONE
    if stated.quantity == "logits":
        return frozenset({FULL})
    return frozenset({SAID}) if {"seq", "sequence", "traj", "trajectory"}.intersection(found) else frozenset({GUESSED})
