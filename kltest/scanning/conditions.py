"""Conditions of a function: those decided by what it is graded with, and those that make variants of a term."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from kltest.scanning.facts import Facts
from kltest.scanning.sides import is_ratio, side
from kltest.scanning.syntax import chain, identifiers, names_in, text
from kltest.symbolic.words import is_mask, says

COEFFICIENT = ("coef", "beta", "weight", "lambda", "lam", "ctl", "alpha", "penalty")
"""Beginnings of the words of coefficients."""
COUNTED = "mask.sum()"
"""Stands for a number of tokens that is handed in."""
UNMASKED = "no mask is known here: numbers at padded positions are in it unless its caller leaves them out"
"""Said of a term whose function has nothing to do with masks; it is no finding."""
UNSET = object()


class NotLiftedError(Exception):
    """A term cannot be lifted; the message says why."""


class Undecided(Exception):
    """A condition that matters has no value yet; `values` are those to be tried, an ellipsis for any other."""

    def __init__(self, text: str, values: Sequence[Any] = (True, False)) -> None:
        super().__init__(text)
        self.text, self.values = text, values


class Conditions:
    """Decides conditions for one choice of the configuration; `looped` are the variables of loops over rollouts."""

    facts: Facts
    choice: Mapping[str, Any]
    looped: set[str]

    def decide(self, test: ast.expr) -> bool | None:
        """Return what a condition gives for the choices made; None if it is not known."""
        if text(test) in self.choice:
            return bool(self.choice[text(test)])
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.decide(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = [self.decide(each) for each in test.values]
            stops = isinstance(test.op, ast.Or)
            if stops in parts:
                return stops
            return None if None in parts else not stops
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compare(test)
        if isinstance(test, ast.Call) and getattr(test.func, "id", "") in ("isinstance", "hasattr"):
            # What is computed of probabilities is a tensor; nothing else is known to be there.
            name = chain(test.args[0])
            kind = chain(test.args[-1]).rsplit(".", 1)[-1]
            computed = name in self.facts.stored and name not in self.facts.term.function.parameters
            return kind == "Tensor" and bool(side(name) or computed)
        if isinstance(test, ast.Call) and (counted := _of_data(test)) is not None:
            return counted
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.Name | ast.Attribute | ast.Subscript):
            name = chain(test)
            if side(name) or is_mask(name) or (says(name, *COEFFICIENT) and not says(name, "use", "adaptive")):
                return True
        return None

    def _compare(self, test: ast.Compare) -> bool | None:
        left, op, right = test.left, test.ops[0], test.comparators[0]
        name = chain(left)
        if isinstance(op, ast.Is | ast.IsNot) and isinstance(right, ast.Constant) and right.value is None:
            there = bool(side(name)) or is_mask(name) or says(name, *COEFFICIENT, "label")
            if not there and name in self.facts.defaults and self.facts.defaults[name] is not None:
                there = True
            if not there and is_ratio(name) and name in self.facts.term.function.parameters:
                return None  # with and without it
            return there == isinstance(op, ast.IsNot)
        if isinstance(op, ast.In | ast.NotIn) and isinstance(left, ast.Constant) and isinstance(left.value, str):
            field = side(left.value) or is_mask(left.value)
            return isinstance(op, ast.In) if field else None
        try:
            other = ast.literal_eval(right)
        except (ValueError, TypeError):
            return None
        value = self.choice.get(text(left), UNSET)
        if value is UNSET and isinstance(other, int | float):
            if says(name, *COEFFICIENT) and len(self._cases(text(left))) < 2:
                value = 1.0
            elif self._is_computed(left):
                value = 1.0 + abs(other)  # a number of tokens, or the like: guards against none of them are not taken
        if value is UNSET:
            return None
        try:
            return bool(_OPERATIONS[type(op)](value, other))
        except (KeyError, TypeError):
            return None

    def undecided(self, test: ast.expr) -> Undecided:
        """Return the choice on which a condition depends, with the values that the function compares it with."""
        for inner in ast.walk(test):
            if isinstance(inner, ast.Compare) and len(inner.ops) == 1:
                option = text(inner.left)
                cases = self._cases(option)
                if cases and option not in self.choice and not self._is_computed(inner.left):
                    return Undecided(option, cases)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.undecided(test.operand)
        if isinstance(test, ast.BoolOp):
            for part in test.values:
                if self.decide(part) is None:
                    return self.undecided(part)
        return Undecided(text(test))

    def _is_computed(self, node: ast.expr) -> bool:
        """Return True for what the function computes itself: no option."""
        # An option that is made a tensor is one still.
        names = names_in(node) - set(self.facts.term.function.parameters)
        return bool(names & self.facts.stored) or any(isinstance(inner, ast.Call) for inner in ast.walk(node))

    def _cases(self, option: str) -> list[Any]:
        """Return the constants that the function compares an expression with, and its default if it is another, else
        one that is none of them."""
        cases = list(self.facts.compared.get(option, ()))
        default = self.facts.defaults.get(option)
        if cases and default is not None and default not in cases:
            cases.append(default)
        elif cases and all(isinstance(case, int | float) for case in cases) and len(cases) > 1:
            cases.append(0.5 * (min(cases) + max(cases)))
        elif cases and default is None:
            cases.append(...)
        return list(dict.fromkeys(cases))


def _of_data(test: ast.Call) -> bool | None:
    """Return what a batch says of itself: some of its tokens are live, and its numbers are finite."""
    said, inside = chain(test.func).rsplit(".", 1)[-1] or getattr(test.func, "attr", ""), set(identifiers(test))
    if said in ("isnan", "isinf") or (said == "any" and inside & {"isnan", "isinf", "isfinite"}):
        return False
    if said == "isfinite" or (said == "all" and "isfinite" in inside):
        return True
    counted = said in ("len", "numel") or (said in ("any", "sum", "count_nonzero") and bool(inside & _LIVE))
    return True if counted else None


_LIVE = frozenset({"mask", "masks", "valid", "live", "keep", "kept", "nonempty"})


def is_nothing(*nodes: ast.stmt | ast.expr) -> bool:
    """Return True for what stands in for a term that is left out: zeros, something times zero, what assigns them."""
    zeros = {"zeros", "zeros_like", "new_zeros"}
    for node in nodes:
        match node:
            case ast.Constant(0) | ast.Pass() | ast.Return(None):
                continue
            case ast.Assign(_, value) | ast.Return(ast.Tuple([value, *_]) | value) if value and is_nothing(value):
                continue
            case ast.UnaryOp(_, value) if is_nothing(value):
                continue
            case ast.BinOp(one, ast.Mult(), other) if is_nothing(one) or is_nothing(other):
                continue
            case ast.Call(called, given) if name := chain(called).rsplit(".", 1)[-1] or getattr(called, "attr", ""):
                if name in zeros or (name in ("tensor", "new_tensor", "array", "asarray") and is_nothing(*given[:1])):
                    continue
        return False
    return bool(nodes)


_OPERATIONS: dict[type, Any] = {
    ast.Eq: lambda one, other: one == other,
    ast.NotEq: lambda one, other: one != other,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Lt: lambda one, other: one < other,
    ast.LtE: lambda one, other: one <= other,
    ast.Gt: lambda one, other: one > other,
    ast.GtE: lambda one, other: one >= other,
}


def number_for(found: Sequence[str]) -> str:
    """Return what stands for a number that nothing else is known of, by the words of its name: steps, processes,
    lengths and numbers of tokens that a loss is divided by, temperatures; the empty string for any other."""
    if {"accumulation", "processes", "world", "workers", "temperature", "temp"}.intersection(found):
        return "1"
    if {"length", "len"}.intersection(found) and {"max", "maximum"}.intersection(found):
        return "8"
    counts = {"total", "num", "n", "count", "global", "number"}.intersection(found)
    return COUNTED if counts and {"length", "len", "items", "token", "tokens"}.intersection(found) else ""
