"""Where a term may end, and the names that matter to it."""

import ast
from dataclasses import dataclass

from kltest.scanning.sides import side
from kltest.scanning.syntax import is_logged, names_in
from kltest.scanning.terms import Term
from kltest.scanning.tree import Tree

RETURN, ITSELF = 0, -1
"""Lines of the ends that are no assignment: whichever return is reached, and the expression of the term itself."""


@dataclass(frozen=True)
class End:
    """The end of a term: the line of a statement, and the name that it is assigned to; a return if it has no name, and
    the place of the term if it is the expression of the term itself."""

    line: int
    name: str


def ends_of(tree: Tree, term: Term, place: str) -> list[End]:
    """Return the possible ends: for a loss its last assignment, then earlier ones; the KL itself last."""
    followed = tree.followed(term.function)
    wanted = {"loss": {"loss"}, "reward": {"reward"}, "helper": {"return"}, "logged": {"logged", "stored"}}[place]
    arrivals = [a for a in followed.arrivals if a.flow.seed in term.seeds]
    names: dict[tuple[int, str], End] = {}
    logged = {
        node.lineno for node in ast.walk(term.function.node) if isinstance(node, ast.Assign) and is_logged(node.value)
    }
    chosen = [a for a in arrivals if a.kind in wanted and a.flow.form != "ratio"]
    returns = {n.lineno: n.value for n in ast.walk(term.function.node) if isinstance(n, ast.Return)}
    if place == "loss":
        chosen = [arrival for arrival in chosen if arrival.line not in logged]
        chosen += [a for a in arrivals if a.kind == "return" and not isinstance(returns.get(a.line), ast.Tuple)]
    for arrival in chosen:
        line = RETURN if arrival.line in returns else arrival.line
        names[line, arrival.name] = End(line, arrival.name)
    ordered = sorted(names.values(), key=lambda end: end.line or 10**9, reverse=place in ("loss", "logged"))
    return ordered if term.mixed else [*ordered, End(ITSELF, place)]  # each part of a mixture is another term


def relevant(term: Term) -> set[str]:
    """Return the names that a term flows into, and those that they are computed from, as far as no field stands for
    them."""
    bound: list[tuple[set[str], ast.expr]] = []
    for node in ast.walk(term.function.node):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            stored: list[ast.expr] = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
            bound.append((names_in(*stored), node.value))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("append", "extend"):
            bound += [(names_in(node.func), each) for each in node.args]
    found = {name for targets, value in bound if term.holds(value) for name in targets}
    grew = True
    while grew:  # forwards from the seeds
        before = len(found)
        for targets, value in bound:
            if names_in(value) & found:
                found |= targets
        grew = len(found) > before
    grew = True
    while grew:  # backwards to the leaves
        before = len(found)
        for targets, value in bound:
            if targets & found:
                found |= {name for name in names_in(value) if side(name) is None}
        grew = len(found) > before
    return found
