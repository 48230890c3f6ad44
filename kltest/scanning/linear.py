"""The statements of a function as one straight line, for one choice of its configuration."""

import ast
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from kltest.scanning.conditions import Conditions, NotLiftedError, is_nothing
from kltest.scanning.facts import Facts
from kltest.scanning.syntax import each_of, mentioned, names_in, says_no_gradient


@dataclass(eq=False)
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

    @cached_property
    def binds(self) -> frozenset[str]:
        """Names that it gives a value."""
        own = {self.target} if self.target else set()
        return frozenset(own.union(names_in(self.over) if self.over else (), *(each.binds for each in self.loop)))

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names that its value reads."""
        return frozenset(names_in(self.value))

    @cached_property
    def mentions(self) -> frozenset[str]:
        """Names and attributes that it mentions, the name that it gives a value aside."""
        return mentioned(self.value).union(*(each.mentions for each in self.loop))

    @cached_property
    def identity(self) -> Hashable:
        """The same for the same statement, in a loop of the same statements."""
        return (self.value, *(each.identity for each in self.loop)) if self.loop else self

    @property
    def lines(self) -> list[int]:
        """Return its line, and those of the statements of a loop."""
        return [self.line, *(line for each in self.loop for line in each.lines)]

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
        if isinstance(node, ast.Raise):
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
        else:
            told = self.facts.term.place == "logged" and node.lineno == self.end
            self.made.statements += _plain(node, quiet, told)
            self.made.returned = isinstance(node, ast.Return) and node.value is not None

    def _loop(self, node: ast.For | ast.While, quiet: bool) -> None:
        """Enter a loop once, all rollouts in one tensor, unless it adds up over them what is read after it."""
        inside = node.lineno <= self.end <= (node.end_lineno or 0)
        if isinstance(node, ast.For) and not inside and self.facts.adds_up(node):
            self.conditions.looped |= names_in(node.target)
            outer, self.made = self.made, Linear()
            self.body(node.body, quiet=quiet)
            loop, self.made = tuple(self.made.statements), outer
            self.made.statements.append(Statement(None, node.iter, node.lineno, quiet, None, loop, node.target))
        elif isinstance(node, ast.While) and not inside and self.facts.holds(*node.body):
            raise NotLiftedError("it is added up in a while loop")
        elif isinstance(node, ast.While) or inside or self.facts.holds(*node.body):
            self.made.statements += _plain(node, quiet)
            self.body(node.body, quiet=quiet)

    def _condition(self, node: ast.If, quiet: bool) -> None:
        decided, over = self.conditions.decide(node.test), self.facts.branches(node)
        if over.first != over.other and _asks_for_none(node.test):
            decided = over.first  # what is optional is there, or is not, as the term needs it
        elif not over.first and _only_raises(node.body) and _asks_for_none(node.test):
            decided = False
        elif decided is None and is_nothing(*node.body) != is_nothing(*node.orelse):
            decided = is_nothing(*node.orelse)
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
        apart = [
            seed
            for seed in self.facts.term.seeds
            if seed.last < node.lineno or seed.first > (node.end_lineno or node.lineno)
        ]
        return bool(apart) and any(isinstance(inner, ast.Return) for inner in ast.walk(node))


@lru_cache(maxsize=10_000)
def _plain(node: ast.stmt, quiet: bool, told: bool = False) -> list[Statement]:
    """Return the assignments of a statement without a body, and of a loop that is entered once those of its variables.

    What is appended to a list is added to it, which is a sum then; what is differentiated has a name, and what a call
    is given if it is the one that logs the term (`told`).
    """
    made: list[Statement] = []

    def assign(target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(name), _:
                made.append(Statement(name, value, node.lineno, quiet))
            case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
                for one, given in zip(targets, values, strict=True):
                    assign(one, given)
            case ast.Tuple(targets), ast.Call():
                for number, one in enumerate(targets):
                    assign(one, ast.Subscript(value, ast.Constant(number), ast.Load()))
            case ast.Subscript() | ast.Attribute(), _:
                # x[i] = …: an end of a term; nothing reads it back under a name.
                made.append(Statement(f"_stored_{node.lineno}", value, node.lineno, quiet))

    if isinstance(node, ast.Assign | ast.AugAssign | ast.Return) and node.value is not None:
        for inner in ast.walk(node.value):
            if isinstance(inner, ast.NamedExpr):
                assign(inner.target, inner.value)
    match node:
        case ast.Assign([target], value) | ast.AnnAssign(target, _, ast.expr() as value):
            assign(target, value)
        case ast.AugAssign(ast.Name(name), op, value):
            made.append(Statement(name, value, node.lineno, quiet, op))
        case ast.Return(ast.expr() as value):
            made.append(Statement(None, value, node.lineno, quiet))
        case ast.Expr(ast.Call(_, given, named)) if told:
            values: list[ast.expr] = [*given, *(each.value for each in named)]
            made.append(Statement(f"_told_{node.lineno}", ast.Tuple(values, ast.Load()), node.lineno, quiet))
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [_] as given)):
            made.append(Statement(name, ast.List(given, ast.Load()), node.lineno, quiet, ast.Add()))
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "extend"), [given])):
            made.append(Statement(name, given, node.lineno, quiet, ast.Add()))
        case ast.Expr(
            ast.Call(ast.Attribute(_, "backward"), [given, *_]) | ast.Call(ast.Attribute(given, "backward"))
        ):  # of accelerator.backward(loss), what it is given
            made.append(Statement("_backward", given, node.lineno, quiet))
        case ast.For(target, iterated):
            for name, value in each_of(target, iterated).items():
                made.append(Statement(name, value, node.lineno, quiet))
    return made


def _asks_for_none(test: ast.expr) -> bool:
    return any(isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Is | ast.IsNot) for n in ast.walk(test))


def _only_raises(statements: list[ast.stmt]) -> bool:
    return all(isinstance(each, ast.Raise | ast.Expr | ast.Pass | ast.Assert) for each in statements)
