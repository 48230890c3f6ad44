"""The statements of a function as one straight line, for one choice of its configuration."""

import ast
from dataclasses import dataclass, field

from kltest.scanning.conditions import Conditions, NotLiftedError
from kltest.scanning.facts import Facts
from kltest.scanning.syntax import each_of, names_in, says_no_gradient


@dataclass
class Statement:
    """One assignment, `target = value`; a return has no target. `quiet`: under torch.no_grad().

    A loop over rollouts is one statement: `loop` are the statements of its body, `over` its variables.
    """

    target: str | None
    value: ast.expr
    line: int
    quiet: bool = False
    augmented: ast.operator | None = None
    loop: "tuple[Statement, ...]" = ()
    over: ast.expr | None = None

    @property
    def binds(self) -> set[str]:
        """Return the names that it gives a value."""
        own = {self.target} if self.target else set()
        return own.union(names_in(self.over) if self.over else (), *(each.binds for each in self.loop))

    @property
    def whole(self) -> ast.expr:
        """Return what the target is assigned: `target + value` for `target += value`."""
        if self.augmented is None:
            return self.value
        return ast.BinOp(ast.Name(str(self.target), ast.Load()), self.augmented, self.value)


@dataclass
class Linear:
    """A function's statements in order; `raises` if this configuration raises an error."""

    statements: list[Statement] = field(default_factory=list)
    raises: bool = False
    returned: bool = False


def linear(facts: Facts, end: int, conditions: Conditions) -> Linear:
    """Return the statements of a function for a choice of its configuration; `end` is a line in a loop that is entered.

    Raises Undecided where a condition decides over a statement that may matter.
    """
    made = Linear()
    _Walk(facts, end, conditions, made).body(facts.term.function.node.body, quiet=False)
    return made


class _Walk:
    def __init__(self, facts: Facts, end: int, conditions: Conditions, made: Linear) -> None:
        self.facts, self.end, self.conditions, self.made = facts, end, conditions, made

    def body(self, statements: list[ast.stmt], *, quiet: bool) -> None:
        for statement in statements:
            if self.made.returned or self.made.raises:
                return
            self.one(statement, quiet)

    def one(self, node: ast.stmt, quiet: bool) -> None:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Return) and node.value is not None:
            for inner in ast.walk(node.value):
                if isinstance(inner, ast.NamedExpr):
                    self.made.statements.append(Statement(inner.target.id, inner.value, node.lineno, quiet))
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], node.value, node, quiet)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, node.value, node, quiet)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self.made.statements.append(Statement(node.target.id, node.value, node.lineno, quiet, node.op))
        elif isinstance(node, ast.Return) and node.value is not None:
            self.made.statements.append(Statement(None, node.value, node.lineno, quiet))
            self.made.returned = True
        elif isinstance(node, ast.Raise):
            self.made.raises = True
        elif isinstance(node, ast.With | ast.AsyncWith):
            silent = any(says_no_gradient(item.context_expr) for item in node.items)
            self.body(node.body, quiet=quiet or silent)
        elif isinstance(node, ast.If):
            self._condition(node, quiet)
        elif isinstance(node, ast.Try):
            self.body([*node.body, *node.orelse, *node.finalbody], quiet=quiet)
        elif isinstance(node, ast.For | ast.While):
            self._loop(node, quiet)
        elif isinstance(node, ast.Expr):
            self._added(node.value, node.lineno, quiet)

    def _added(self, call: ast.expr, line: int, quiet: bool) -> None:
        """Add what is appended to a list, which is a sum then, and what is differentiated."""
        match call:
            case ast.Call(_, given, named) if self.facts.term.place == "logged" and line == self.end:
                told: list[ast.expr] = [*given, *(each.value for each in named)]
                self.made.statements.append(Statement(f"_told_{line}", ast.Tuple(told, ast.Load()), line, quiet))
            case ast.Call(ast.Attribute(ast.Name(name), "append"), [_]):
                self.made.statements.append(Statement(name, ast.List(call.args, ast.Load()), line, quiet, ast.Add()))
            case ast.Call(ast.Attribute(_, "backward"), [given, *_]) | ast.Call(ast.Attribute(given, "backward")):
                self.made.statements.append(Statement("_backward", given, line, quiet))  # of accelerator.backward(loss)
            case ast.Call(ast.Attribute(ast.Name(name), "extend"), [given]):
                self.made.statements.append(Statement(name, given, line, quiet, ast.Add()))

    def _loop(self, node: ast.For | ast.While, quiet: bool) -> None:
        """Enter a loop once, all rollouts in one tensor, unless it adds up over them what is read after it."""
        inside = node.lineno <= self.end <= (node.end_lineno or 0)
        if isinstance(node, ast.For) and not inside and self.facts.adds_up(node):
            self.conditions.looped |= names_in(node.target)
            outer, self.made = self.made, Linear()
            self.body(node.body, quiet=quiet)
            loop, self.made = tuple(self.made.statements), outer
            self.made.statements.append(Statement(None, node.iter, node.lineno, quiet, None, loop, node.target))
        elif isinstance(node, ast.While) and not inside and self.facts.holds(node.body):
            raise NotLiftedError("it is added up in a while loop")
        elif isinstance(node, ast.While) or inside or self.facts.holds(node.body):
            if isinstance(node, ast.For):
                for name, value in each_of(node.target, node.iter).items():
                    self.made.statements.append(Statement(name, value, node.lineno, quiet))
            self.body(node.body, quiet=quiet)

    def _assign(self, target: ast.expr, value: ast.expr, node: ast.stmt, quiet: bool) -> None:
        if isinstance(target, ast.Name):
            self.made.statements.append(Statement(target.id, value, node.lineno, quiet))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, given in zip(target.elts, value.elts, strict=True):
                self._assign(one, given, node, quiet)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            for number, one in enumerate(target.elts):
                self._assign(one, ast.Subscript(value, ast.Constant(number), ast.Load()), node, quiet)
        elif isinstance(target, ast.Subscript | ast.Attribute):
            # x[i] = …: an end of a term; nothing reads it back under a name.
            self.made.statements.append(Statement(f"_stored_{node.lineno}", value, node.lineno, quiet))

    def _condition(self, node: ast.If, quiet: bool) -> None:
        decided, over = self.conditions.decide(node.test), self.facts.branches(node)
        if over.first != over.other and _asks_for_none(node.test):
            decided = over.first  # what is optional is there, or is not, as the term needs it
        elif not over.first and _only_raises(node.body) and _asks_for_none(node.test):
            decided = False
        if decided is None:
            if over.first != over.other and not over.together and not self._returns_one_of_several(node):
                decided = over.first
            elif not over.first and _only_raises(node.body):
                decided = False
            elif not (over.first or over.other or over.decides):
                return
            else:
                raise self.conditions.undecided(node.test)
        self.body(node.body if decided else node.orelse, quiet=quiet)

    def _returns_one_of_several(self, node: ast.If) -> bool:
        """Return True for a branch that returns a form of the term of which another is made elsewhere."""
        apart = [seed for seed in self.facts.term.seeds
                 if seed.last < node.lineno or seed.first > (node.end_lineno or node.lineno)]  # fmt: skip
        return bool(apart) and any(isinstance(inner, ast.Return) for inner in ast.walk(node))


def _asks_for_none(test: ast.expr) -> bool:
    return any(isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Is | ast.IsNot) for n in ast.walk(test))


def _only_raises(statements: list[ast.stmt]) -> bool:
    return all(isinstance(each, ast.Raise | ast.Expr | ast.Pass | ast.Assert) for each in statements)
