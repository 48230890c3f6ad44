"""Evaluation of expressions: the sides that they carry, and log-ratios in their forms."""

import ast
from collections.abc import Callable
from typing import Any

from kltest.scanning.callees import Function
from kltest.scanning.flows import (
    ENTROPY,
    FULL,
    LOG_RATIO,
    NOTHING,
    OTHER,
    RATIO,
    SHIFTED,
    SQUARE,
    Flow,
    Seed,
    Value,
    added,
    completed,
    joined,
    mixed,
    multiplied,
    seeded,
)
from kltest.scanning.sides import WHOSE, Side, is_number, kind_of, side, who_of
from kltest.scanning.syntax import chain, each_of, identifiers
from kltest.scanning.tree import Arrival, Followed, Tree
from kltest.symbolic.words import is_mask, is_preference, says, says_kl

"""Beginnings of the words of what is a loss, and of what is a reward."""
_NORMALISES = frozenset({"logsumexp", "logaddexp", "max", "amax", "log", "lse", "norm", "float", "tensor", "sum"})


class Expressions:
    """Evaluates expressions by what they carry; the names of a function are known to whoever follows its statements."""

    def __init__(self, tree: Tree, function: Function) -> None:
        self.tree, self.function = tree, function
        self.found = Followed()
        self.names: dict[str, Value] = {}
        self.seeds: dict[int, Seed] = {}
        self.without_gradient = 0
        self.statement: ast.stmt | None = None
        self.key = ""

    # Binding and arriving.

    def _bind(self, target: ast.expr, value: Value, written: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = written.elts if isinstance(written, ast.Tuple | ast.List) else []
            for number, inner in enumerate(target.elts):
                if len(parts) == len(target.elts):
                    self._bind(inner, self.value(parts[number]), parts[number])
                elif len(value.items) == len(target.elts):
                    self._bind(inner, value.items[number], written)
                else:
                    # One of several results: what it carries is told by its name.
                    told = number == 0 or says_kl(chain(inner)) or kind_of(chain(inner))
                    self._bind(inner, value.flowing() if told else NOTHING, inner)
            return
        name = chain(target)
        if isinstance(target, ast.Name):
            value = NOTHING if is_number(name) else value
            stated = side(name)
            if stated and all(flow.seed.parameter or flow.seed.named for flow in value.flows):
                whose = {Side(each.quantity, stated.who) for each in value.sides} if stated.sure else value.sides
                value = Value(frozenset(whose or {stated}), items=value.items)
            self.names[name] = value
            if stated and not stated.sure:
                self.found.whose.setdefault(name, set()).update(each.who for each in value.sides or {stated})
            if says_kl(name):
                self.found.kl_named |= {flow.seed for flow in value.flows if flow.form != RATIO}
        self._store(name, value, stored=not isinstance(target, ast.Name))

    def _store(self, name: str, value: Value, *, stored: bool = True) -> None:
        """Record what is assigned to a name that says what becomes of it, or is stored where others may read it."""
        if not value.flows or not name:
            return
        if kind := kind_of(name, self.function.name):
            self._arrive(value, kind, name)
        elif stored:
            self._arrive(value, "stored", name.rsplit(".", 1)[-1])

    def _arrive(self, value: Value, kind: str, name: str) -> None:
        for flow in sorted(value.flows, key=Flow.order):
            self.found.arrivals.append(Arrival(flow, kind, self._line(), name, bool(self.without_gradient)))

    def _told(self) -> str:
        """Return what the statement at hand says of what it makes: its target, or what it calls, with which words."""
        match self.statement:
            case ast.Assign([target]) | ast.AnnAssign(target) | ast.AugAssign(target):
                return chain(target)
            case ast.Expr(ast.Call(called, given)):
                return " ".join([chain(called), *(str(each.value) for each in given if isinstance(each, ast.Constant))])
        return ""

    def _line(self) -> int:
        return self.statement.lineno if self.statement is not None else self.function.line

    def _bind_each(self, target: ast.expr, iterated: ast.expr) -> None:
        """Bind the variables of a loop to what the iterated things carry."""
        for name, meant in each_of(target, iterated).items():
            value = self.value(meant)
            self.names.pop(name, None)
            if value.flows or value.sides:
                self.names[name] = value

    # Expressions.

    def value(self, node: ast.AST | None) -> Value:
        """Return what an expression carries."""
        handler: Callable[[Any], Value] | None = getattr(self, f"_of_{type(node).__name__}", None)
        return NOTHING if handler is None else handler(node)

    def _of_Name(self, node: ast.Name) -> Value:
        if is_preference(node.id):
            return NOTHING
        known = self.names.get(node.id)
        if known is not None and (known.sides or known.flows):
            return known
        return self._stated(node.id)

    def _of_Attribute(self, node: ast.Attribute) -> Value:
        if node.attr in ("dtype", "shape", "device", "ndim"):
            return NOTHING
        name = chain(node)
        stated = self._stated(name)
        if stated.sides or stated.flows or not name:
            if not name:
                inner = self.value(node.value)
                own = side(node.attr)
                if own and not inner.sides and not inner.flows:
                    who = who_of(" ".join(identifiers(node.value)))
                    return Value(frozenset({Side(own.quantity, who or own.who, who is not None)}))
                return inner
            return stated
        root: ast.expr = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        inner = self.names.get(root.id, NOTHING) if isinstance(root, ast.Name) else NOTHING
        return Value(inner.sides, frozenset(f for f in inner.flows if not f.seed.parameter))

    def _of_Subscript(self, node: ast.Subscript) -> Value:
        inner = self.value(node.value)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(index, int) and -len(inner.items) <= index < len(inner.items):
            return inner.items[index]
        if (inner.sides or inner.flows) and not isinstance(index, str):
            return inner
        return self._stated(chain(node))

    def _stated(self, name: str) -> Value:
        if stated := side(name):
            return Value(frozenset({stated}))
        if says_kl(name) and not says(name, "coef", "beta", "ctl", "config", "target", "type", "penalty_type"):
            key = name.rsplit(".", 1)[-1]
            seed = self.seeds.setdefault(hash(("named", key)), Seed(self._line(), self._line(), named=key))
            return seeded(seed, LOG_RATIO)
        return NOTHING

    def _of_BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Sub | ast.Div) and (met := self._meeting(node, left, right)):
            return met
        if isinstance(node.op, ast.Mult) and (met := self._weighted(node, left, right)):
            return met
        if isinstance(node.op, ast.Add | ast.Sub) and (crossed := completed(left, right)):
            return seeded(self._seed(node, crossed.who), FULL)
        total = self._operated(node.op, left, right, node)
        weighed = isinstance(node.op, ast.Mult | ast.Div) and any(flow.form == ENTROPY for flow in total.flows)
        if weighed and not any(map(is_mask, identifiers(node))):  # a bonus, which completes no divergence
            return Value(total.sides, frozenset(flow for flow in total.flows if flow.form != ENTROPY))
        return total

    def _operated(self, op: ast.operator, left: Value, right: Value, node: ast.BinOp | None = None) -> Value:
        if isinstance(op, ast.Pow):
            power = node.right if node else None
            if isinstance(power, ast.Constant) and power.value == 2:
                return left.flowing().formed(log_ratio=SQUARE, shifted=OTHER)
            return left.flowing()
        if isinstance(op, ast.Add | ast.Sub):
            total = added(left, right)
            if (
                node is not None
                and bool(left.flows) != bool(right.flows)
                and not isinstance(node.right if left.flows else node.left, ast.Constant)
            ):
                total = total.formed(log_ratio=SHIFTED)
        elif isinstance(op, ast.Mult | ast.MatMult):
            total = multiplied(left, right)
        else:
            total = Value(frozenset(), left.flows | right.flows)
        if total.flows:
            return total
        if isinstance(op, ast.Add) and (mixture := mixed("prob", left.sides, right.sides)):
            return mixture
        # The same side shifted or scaled, as logits / temperature: still that side.
        sides = left.sides or right.sides
        one_side = not (left.sides and right.sides) or left.sides == right.sides
        one_side = one_side and isinstance(op, ast.Mult | ast.Div | ast.Add | ast.Sub)
        whose = {each.quantity for each in sides}
        if isinstance(op, ast.Sub) and node and left.sides != right.sides and whose == {"logp"}:
            other = node.right if left.sides else node.left  # if it does not normalise them, they are none after it
            one_side &= not isinstance(other, ast.Call) or bool(_NORMALISES.intersection(identifiers(other)))
        return Value(sides if one_side else frozenset())

    def _meeting(self, node: ast.BinOp, left: Value, right: Value) -> Value | None:
        """Return a log-ratio where the log-probs of two sides are subtracted, or their probabilities divided."""
        quantity = "prob" if isinstance(node.op, ast.Div) else "logp"
        fitting = ("prob",) if quantity == "prob" else ("logp", "logits")
        one, other = ({s for s in value.sides if s.quantity in fitting} for value in (left, right))
        if not one or not other or left.flows or right.flows:
            return None
        pair = frozenset(s.who for s in one | other)
        texts = (ast.unparse(node.left), ast.unparse(node.right))
        guess = ", ".join(
            f"{text[:60]} is the {WHOSE[s.who]}"
            for text, sides in zip(texts, (one, other), strict=True)
            for s in sorted(sides)
            if not s.sure
        )
        if len(pair) < 2:
            named = says_kl(self.function.name) or says_kl(self.function.owner)
            both = isinstance(node.left, ast.Name) and isinstance(node.right, ast.Name)
            if not (named and both and guess and texts[0] != texts[1]):
                return None
            pair, guess = frozenset({"", "ref_"}), f"{texts[0]} is the policy, {texts[1]} is the reference"
        seed = self._seed(node, pair, texts, guess)
        return seeded(seed, LOG_RATIO if quantity == "logp" else RATIO)

    def _weighted(self, node: ast.expr, left: Value, right: Value) -> Value | None:
        """Return a cross-entropy where the log-probs of one side are weighted with the probabilities of another."""
        for one, other in ((left, right), (right, left)):
            weights = {s.who for s in one.sides if s.quantity == "prob"}
            weighted = {s.who for s in other.sides if s.quantity == "logp"}
            if weights and weighted and not (one.flows or other.flows):
                seed = self._seed(node, frozenset(weights | weighted))
                seed.weights = min(weights)
                return seeded(seed, ENTROPY if weights == weighted else FULL)
        return None

    def _seed(self, node: ast.expr, pair: frozenset[str], texts: tuple[str, str] = ("", ""), guess: str = "") -> Seed:
        key = id(node)
        if key not in self.seeds:
            line = self.statement.lineno if self.statement is not None else node.lineno
            lines, quiet = (min(line, node.lineno), node.end_lineno or node.lineno), bool(self.without_gradient)
            self.seeds[key] = Seed(*lines, pair, texts, guess, quiet=quiet)
        return self.seeds[key]

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        return self.value(node.operand)

    def _of_IfExp(self, node: ast.IfExp) -> Value:
        return self.value(node.body) | self.value(node.orelse)

    def _of_BoolOp(self, node: ast.BoolOp) -> Value:
        return joined(map(self.value, node.values))

    def _of_Starred(self, node: ast.Starred | ast.Await) -> Value:
        return self.value(node.value)

    _of_Await = _of_Starred

    def _of_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self._bind(node.target, value, node.value)
        return value

    def _of_Tuple(self, node: ast.Tuple | ast.List) -> Value:
        values = tuple(map(self.value, node.elts))
        total = joined(values)
        return Value(total.sides, total.flows, values)

    _of_List = _of_Tuple

    def _of_Dict(self, node: ast.Dict) -> Value:
        for key, item in zip(node.keys, node.values, strict=True):
            before = self.key
            self.key = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
            value = self.value(item)
            if self.key and kind_of(self._told()) == "logged":
                self._arrive(value, "logged", self.key)
            elif self.key:
                self._store(self.key, value)
            self.key = before
        return NOTHING

    def _of_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> Value:
        before = dict(self.names)
        for part in node.generators:
            self._bind_each(part.target, part.iter)
        value = self.value(node.elt)
        self.names = before
        return Value(value.sides, value.flows)

    _of_GeneratorExp = _of_SetComp = _of_ListComp
