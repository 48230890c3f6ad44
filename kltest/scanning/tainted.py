"""What the seeds of a term flow into, statement by statement."""

import ast
from collections.abc import Sequence, Set

from kltest.scanning.conditions import NotLiftedError
from kltest.scanning.facts import Facts
from kltest.scanning.flows import Seed
from kltest.scanning.linear import Statement
from kltest.scanning.syntax import names_in
from kltest.scanning.terms import Term

PART = ", which reads the reference as well: both may be parts of one divergence"


def tainted_by(facts: Facts, statements: Sequence[Statement], before: Set[str] = frozenset()) -> list[frozenset[str]]:
    """Return the names that the term's seeds flow into, before each statement and after the last."""
    known = frozenset(before)
    found = [known]
    for statement in statements:
        if statement.loop:
            known = tainted_by(facts, statement.loop, tainted_by(facts, statement.loop, known)[-1])[-1]
        if statement.target is not None:
            if statement.reads & known or facts.holds(statement.value):
                known |= {statement.target}
            elif not statement.augmented:
                known -= {statement.target}
        found.append(known)
    return found


def is_tainted(node: ast.AST, tainted: Set[str], term: Term) -> bool:
    return bool(names_in(node) & tainted) or term.holds(node)


def alone(facts: Facts, statements: Sequence[Statement]) -> list[tuple[Seed, Sequence[Set[str]], Term]]:
    """Return the seeds that stand in the statements, if there are several: the names that each alone has flowed into
    before each statement, and the term that it is alone."""
    lines = {line for each in statements for line in each.lines} if facts.alone else set()
    standing = [(seed, own) for seed, own in facts.alone if not lines.isdisjoint(range(seed.first, seed.last + 1))]
    return [(seed, tainted_by(own, statements), own.term) for seed, own in standing]


def meeting_of_all(facts: Facts, statements: Sequence[Statement], number: int) -> int:
    """Return the first statement, from one on, into which all seeds flow that stand before it; that one if none is."""
    before = {seed for seed, *_ in alone(facts, statements[: number + 1])}
    each = [(flowing, own) for seed, flowing, own in alone(facts, statements) if seed in before]
    for later in range(number, len(statements)):
        if all(is_tainted(statements[later].whole, flowing[later], own) for flowing, own in each):
            return later
    return number


def linear_part(node: ast.expr, tainted: Set[str], facts: Facts) -> ast.expr:
    """Return an expression without the summands that the term does not flow into, constants excepted.

    Raises NotLiftedError if such a summand reads the reference: it may be a part of the same divergence.
    """
    term = facts.term

    def left_out(summand: ast.expr) -> None:
        if term.whole and names_in(summand) & facts.of_reference:
            raise NotLiftedError(f"it is added to {ast.unparse(summand)[:60]}{PART}")

    class Part(ast.NodeTransformer):
        def visit_BinOp(self, inner: ast.BinOp) -> ast.expr:
            if isinstance(inner.op, ast.Add | ast.Sub):
                left, right = (is_tainted(each, tainted, term) for each in (inner.left, inner.right))
                if left and not right and not _is_constant(inner.right) and not _meets(inner, term):
                    left_out(inner.right)
                    return self.visit(inner.left)
                if right and not left and not _is_constant(inner.left) and not _meets(inner, term):
                    left_out(inner.left)
                    kept = self.visit(inner.right)
                    return kept if isinstance(inner.op, ast.Add) else ast.UnaryOp(ast.USub(), kept)
            if _meets(inner, term):
                return inner
            self.generic_visit(inner)
            return inner

    return Part().visit(node)


def _meets(node: ast.BinOp, term: Term) -> bool:
    return any(
        (node.lineno, node.end_lineno) == (s.first, s.last)
        or (ast.unparse(node.left) == s.texts[0] and ast.unparse(node.right) == s.texts[1])
        for s in term.seeds
        if hasattr(node, "lineno")
    )


def _is_constant(node: ast.expr) -> bool:
    return not any(isinstance(inner, ast.Name | ast.Attribute | ast.Call) for inner in ast.walk(node))
