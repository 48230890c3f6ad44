"""Following one function, statement by statement, without running it: what each name carries, and where it arrives."""

import ast
from collections.abc import Callable, Mapping, Sequence

from kltest.scanning.callees import Function
from kltest.scanning.calls import Calls
from kltest.scanning.facts import defaults_of
from kltest.scanning.flows import LOG_RATIO, NOTHING, Seed, Value, joined, seeded
from kltest.scanning.sides import LOSS, REWARD, Side, is_number, side
from kltest.scanning.sources import Source
from kltest.scanning.syntax import chain, is_logged, says_no_gradient
from kltest.scanning.tree import Followed, Given, Tree
from kltest.symbolic.words import is_mask, says, says_kl


def follow(tree: Tree, function: Function, given: Given = ()) -> Followed:
    """Follow a function's statements in order, both branches of each condition, loops twice."""
    return _Follower(tree, function).run(dict(given))


def tree_of(sources: Sequence[Source]) -> Tree:
    """Return the tree of these sources, each function of which is followed when it is first asked for."""
    return Tree(sources, follow)


class _Follower(Calls):
    def run(self, given: Mapping[str, frozenset[Side]]) -> Followed:
        numbers = {name for name, value in defaults_of(self.function).items() if isinstance(value, int | float)}
        for name in self.function.parameters:
            if name in given:
                self.names[name] = Value(given[name])
            elif side(name) is None and not (is_mask(name) or is_number(name) or name in numbers):
                seed = Seed(self.function.line, self.function.line, parameter=name)
                self.names[name] = seeded(seed, LOG_RATIO)
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
        if isinstance(node.value, ast.IfExp):
            for either in (node.value.body, node.value.orelse):
                self._on_Return(ast.copy_location(ast.Return(either), node))
            return
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
            if is_logged(part) and (number or len(parts) > 1):
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
            self._arrive(value, "logged", self._told())

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
