"""Following one function, statement by statement, without running it: what each name carries, and where it arrives."""

import ast
import re
from collections.abc import Callable, Sequence

from kltest.scanning.calls import Calls
from kltest.scanning.expressions import LOSS, REWARD, identifiers
from kltest.scanning.flows import LOG_RATIO, NOTHING, RATIO, Flow, Seed, Value, joined
from kltest.scanning.sides import METRICS, Side, chain, says, says_kl, side, words
from kltest.scanning.sources import Source
from kltest.scanning.tree import Arrival, Followed, Function, Tree


def follow(tree: Tree, function: Function) -> Followed:
    """Follow a function's statements in order, both branches of each condition, loops twice."""
    return _Follower(tree, function).run()


def tree_of(sources: Sequence[Source]) -> Tree:
    """Return the tree of these sources, each function of which is followed when it is first asked for."""
    return Tree(sources, follow)


class _Follower(Calls):
    def __init__(self, tree: Tree, function: Function) -> None:
        self.tree, self.function = tree, function
        self.found = Followed()
        self.names: dict[str, Value] = {}
        self.seeds: dict[int, Seed] = {}
        self.without_gradient = 0
        self.statement: ast.stmt | None = None

    def run(self) -> Followed:
        for name in self.function.parameters:
            if side(name) is None and name not in ("self", "cls"):
                seed = Seed(self.function.line, self.function.line, parameter=name)
                self.names[name] = Value(frozenset(), frozenset({Flow(seed, LOG_RATIO)}))
        self._body(self.function.node.body)
        return self.found

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement = statement
            handler: Callable[[ast.stmt], None] | None = getattr(self, f"_on_{type(statement).__name__}", None)
            if handler is not None:
                handler(statement)

    # Statements.

    def _on_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._bind(target, value, node.value)

    def _on_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, self.value(node.value), node.value)

    def _on_AugAssign(self, node: ast.AugAssign) -> None:
        before, value = self.value(node.target), self.value(node.value)
        self._bind(node.target, self._operated(node.op, before, value), node.value)

    def _on_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        parts = node.value.elts if isinstance(node.value, ast.Tuple) and node.value.elts else [node.value]
        values = [self.value(part) for part in parts]
        items = tuple(values) if len(values) > 1 else values[0].items
        total = joined(values)
        before = self.found.returned
        if not items or len(before.items) not in (0, len(items)):
            items = ()
        elif before.items:
            items = tuple(one | other for one, other in zip(before.items, items, strict=True))
        self.found.returned = Value(before.sides | total.sides, before.flows | total.flows, items)
        title = self.function.title
        kind = "return"
        if says(title, *LOSS):
            kind = "loss"
        elif says(self.function.name, *REWARD):
            kind = "reward"
        for number, (part, value) in enumerate(zip(parts, values, strict=True)):
            named = chain(part) or chain(getattr(part, "func", part))
            if _is_detached(part) and (number or len(parts) > 1):
                continue
            # What is returned beside a loss is something logged.
            beside = "return" if kind == "return" or says_kl(named) else "logged"
            self._arrive(value, kind if number == 0 else beside, named)

    def _on_Expr(self, node: ast.Expr) -> None:
        call = node.value
        value = self.value(call)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return
        holder, method = chain(call.func.value), call.func.attr
        if method == "backward":
            self._arrive(self.value(call.func.value) | joined(map(self.value, call.args)), "loss", "backward")
        elif method in ("append", "extend", "add_", "copy_", "sub_") and holder:
            given = joined(map(self.value, call.args))
            self._store(holder, given)
            if isinstance(call.func.value, ast.Name):
                self.names[holder] = self.names.get(holder, NOTHING) | given
        elif value.flows:
            self._arrive(value, "logged", method)

    def _on_If(self, node: ast.If) -> None:
        before = dict(self.names)
        self._body(node.body)
        then, self.names = self.names, dict(before)
        self._body(node.orelse)
        for name, value in then.items():
            other = self.names.get(name)
            self.names[name] = value if other is None or other == value else value | other

    def _on_For(self, node: ast.For) -> None:
        self._bind_each(node.target, node.iter)
        for _ in range(2):
            self._body(node.body)
        self._body(node.orelse)

    _on_AsyncFor = _on_For

    def _on_While(self, node: ast.While) -> None:
        self._body(node.body)
        self._body(node.orelse)

    def _on_With(self, node: ast.With) -> None:
        quiet = any(says_no_gradient(item.context_expr) for item in node.items)
        self.without_gradient += quiet
        self._body(node.body)
        self.without_gradient -= quiet

    _on_AsyncWith = _on_With

    def _on_Try(self, node: ast.Try) -> None:
        self._body(node.body)
        for handler in node.handlers:
            self._body(handler.body)
        self._body(node.orelse)
        self._body(node.finalbody)

    def _on_Match(self, node: ast.Match) -> None:
        for case in node.cases:
            self._body(case.body)

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
                    self._bind(inner, value.flowing() if _is_first_or_kl(number, inner) else NOTHING, inner)
            return
        name = chain(target)
        if isinstance(target, ast.Name):
            stated = side(name)
            if stated and all(flow.seed.parameter or flow.seed.named for flow in value.flows):
                whose = {Side(each.quantity, stated.who) for each in value.sides} if stated.sure else value.sides
                value = Value(frozenset(whose or {stated}), items=value.items)
            self.names[name] = value
            if says_kl(name):
                self.found.kl_named |= {flow.seed for flow in value.flows if flow.form != RATIO}
            for flow in value.flows:
                self.found.last_line[flow.seed] = self._line()
        self._store(name, value, stored=not isinstance(target, ast.Name))

    def _store(self, name: str, value: Value, *, stored: bool = True) -> None:
        """Record what is assigned to a name that says what becomes of it, or is stored where others may read it."""
        if not value.flows or not name:
            return
        if METRICS.intersection(words(name)):
            self._arrive(value, "logged", name)
        elif says(name, *LOSS):
            self._arrive(value, "loss", name)
        elif says(name, *REWARD) and not says_kl(re.split(r"[._]", name)[-1]):
            self._arrive(value, "reward", name)
        elif stored:
            self._arrive(value, "stored", name.rsplit(".", 1)[-1])

    def _arrive(self, value: Value, kind: str, name: str) -> None:
        for flow in sorted(value.flows, key=Flow.order):
            self.found.arrivals.append(Arrival(flow, kind, self._line(), name, bool(self.without_gradient)))

    def _line(self) -> int:
        return self.statement.lineno if self.statement is not None else self.function.line

    def _bind_each(self, target: ast.expr, iterated: ast.expr) -> None:
        """Bind the variables of a loop to what the iterated things carry, through zip and enumerate."""
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and isinstance(target, ast.Tuple):
            if iterated.func.id == "enumerate" and len(target.elts) == 2 and iterated.args:
                self._bind_each(target.elts[1], iterated.args[0])
                return
            if iterated.func.id == "zip" and len(iterated.args) == len(target.elts):
                for inner, argument in zip(target.elts, iterated.args, strict=True):
                    self._bind_each(inner, argument)
                return
        value = self.value(iterated)
        if isinstance(target, ast.Name):
            self.names[target.id] = value if value.flows or value.sides else NOTHING
            if not (value.flows or value.sides):
                del self.names[target.id]


def each_of(target: ast.expr, iterated: ast.expr) -> dict[str, ast.expr]:
    """Return what the variables of a loop stand for if all rollouts are one tensor: through zip and enumerate, what
    is iterated."""
    called = iterated.func.id if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) else ""
    if called == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        return each_of(target.elts[1], iterated.args[0])  # type: ignore[attr-defined]
    if called == "zip" and isinstance(target, ast.Tuple):
        pairs = zip(target.elts, iterated.args, strict=False)  # type: ignore[attr-defined]
        return {name: value for one, other in pairs for name, value in each_of(one, other).items()}
    return {target.id: iterated} if isinstance(target, ast.Name) and called != "range" else {}


def says_no_gradient(node: ast.expr) -> bool:
    """Return True for `torch.no_grad()` and `torch.inference_mode()`."""
    return any(part in ("no_grad", "inference_mode") for part in identifiers(node))


def _is_detached(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("detach", "item")


def _is_first_or_kl(number: int, target: ast.expr) -> bool:
    return number == 0 or says_kl(chain(target)) or says(chain(target), *LOSS, *REWARD)
