"""The backward slice of a term: the statements that it needs, up to where it ends."""

import ast
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kltest.scanning.conditions import NotLiftedError
from kltest.scanning.ends import RETURN, End
from kltest.scanning.facts import Facts
from kltest.scanning.leaves import Leaves
from kltest.scanning.linear import Statement
from kltest.scanning.sides import MIXED, POLICY, REFERENCE, SAMPLER, side
from kltest.scanning.syntax import chain, copied, is_logged, mentioned, names_in
from kltest.scanning.tainted import alone, is_tainted, linear_part, meeting_of_all, tainted_by
from kltest.scanning.terms import Term
from kltest.scanning.variants import REDUCED
from kltest.symbolic.words import is_mask, says_kl

UNRETURNED = "it is not returned in this configuration"
UNREACHED_END = "the statement at which it arrives is not reached in this configuration"
UNREACHED_TERM = "it is not reached in this configuration"
DETACHED = "it is detached, and what it is multiplied with could not be cut out"
_FIELDS = REDUCED | {f"{who}{what}" for who in (POLICY, REFERENCE, SAMPLER, MIXED) for what in ("logp", "logits")}
"""Names of fields that may stand in what is cut out, and be names of the function as well."""


class Slice:
    """A term up to its end in the statements of one configuration: `last` of them, those `before` it, what the term has
    flowed into (`tainted`) before each of these and the last, and the expression, `result`, that it ends in.

    Raises NotLiftedError if the term does not arrive there.
    """

    def __init__(self, facts: Facts, end: End, statements: Sequence[Statement]) -> None:
        tainted = tainted_by(facts, statements)
        number, result = _end_of(facts, end, statements, tainted)
        for seed, flowing, own in alone(facts, statements):
            if not is_tainted(statements[number].whole, flowing[number], own):
                raise NotLiftedError(f"only a part of it could be cut out, without what line {seed.first} adds")
        self.facts, self.last, self.before, self.tainted = facts, statements[number], statements[:number], tainted
        self.result = linear_part(copied(result), tainted[number], facts)

    def decisive(self) -> tuple[Any, ...]:
        """Return what is equal for slices of which the same is cut out: each statement that may be needed, with those
        of the names it mentions that the term has flowed into."""
        number = len(self.before)
        found: list[Any] = [(self.last, self.tainted[number] & self.last.mentions)]
        needed = _FIELDS | mentioned(self.result)
        while number:
            number -= 1
            statement, before, after = self.before[number], self.tainted[number], self.tainted[number + 1]
            if not statement.binds & needed:
                continue
            flowing = before & (statement.mentions | statement.binds)
            found.append((statement.identity, flowing))
            mentions = statement.mentions
            if statement.target in after:
                mentions = _linear_mentions(self.facts, statement, flowing)
            target = statement.target or ""
            stays = statement.augmented and target in before
            if not stays and (target in after or not (side(target) or is_mask(target))):
                needed -= {target} - _FIELDS
            needed |= mentions
        return tuple(found)

    def cut_out(self, leaves: Leaves) -> tuple[list[Statement], ast.expr]:
        """Return the statements that the term needs, in order, and the expression that it ends in."""
        result = leaves.replace(copied(self.result))
        return _needed(self.before, self.tainted, names_in(result), leaves), result


@lru_cache(maxsize=10_000)
def _linear_mentions(facts: Facts, statement: Statement, tainted: frozenset[str]) -> frozenset[str]:
    with suppress(NotLiftedError):
        return mentioned(linear_part(copied(statement.value), tainted, facts))
    return statement.mentions


def _needed(
    statements: Sequence[Statement],
    tainted: Sequence[Set[str]],
    needed: set[str],
    leaves: Leaves,
    part: tuple[ast.expr, Set[str]] | None = None,
) -> list[Statement]:
    """Return those of the statements that bind what is needed; `needed` becomes what they need before the first.

    `part` is the index of the rollouts of a round in a loop over them, and the names that depend on it.
    """
    kept: list[Statement] = []
    added_up: set[str] = set()
    for number in reversed(range(len(statements))):
        statement = statements[number]
        target, value = statement.target, statement.value
        if statement.loop and statement.binds & needed:
            added_up |= statement.binds & needed
            kept.append(_needed_loop(statement, tainted[number], needed, leaves))
            continue
        if target is None or target not in needed:
            continue
        if target in tainted[number + 1]:
            value = linear_part(copied(value), tainted[number], leaves.facts)
        elif target in added_up:  # what it is added to is none of the term's
            value = ast.List([], ast.Load()) if isinstance(value, ast.List) else ast.Constant(0.0)
        elif leaves.is_leaf(target, value):
            field = leaves.stands_for(target, target)
            if isinstance(field, ast.Name) and (reduced := leaves.reduced(field.id, value, target)) is not None:
                kept.append(replace(statement, value=reduced))
                needed.discard(target)
                continue
            if part is None or field is None or not names_in(value) & part[1]:
                continue
            value = ast.Subscript(field, part[0], ast.Load())
        value = leaves.replace(copied(value))
        if not statement.augmented:
            needed.discard(target)
        elif target not in tainted[number]:
            needed.discard(target)
            statement = replace(statement, augmented=None)
        needed |= names_in(value)
        kept.append(replace(statement, value=value))
    kept.reverse()
    return kept


def _needed_loop(loop: Statement, before: Set[str], needed: set[str], leaves: Leaves) -> Statement:
    tainted = tainted_by(leaves.facts, loop.loop, tainted_by(leaves.facts, loop.loop, before)[-1])
    while True:  # what a round needs of the one before it is needed as well
        wanted = set(needed)
        kept = _needed(loop.loop, tainted, wanted, leaves, _part_of(loop))
        if wanted <= needed:
            break
        needed |= wanted
    value = leaves.replace(copied(loop.value))
    needed -= names_in(loop.over) if loop.over else set()
    needed |= names_in(value)
    return replace(loop, value=value, loop=tuple(kept))


def _part_of(loop: Statement) -> tuple[ast.expr, Set[str]] | None:
    """Return the index of the rollouts of a round in a loop that counts them, one by one or in chunks, and the names
    that depend on it; None for another loop."""
    match loop.over, loop.value:
        case ast.Name(name), ast.Call(ast.Name("range"), given):
            index: ast.expr = ast.Name(name, ast.Load())
            if len(given) == 3:
                index = ast.Slice(index, ast.BinOp(index, ast.Add(), copied(given[2])))
        case _:
            return None
    depending = {name}
    for each in loop.loop:
        if each.target and names_in(each.value) & depending:
            depending.add(each.target)
    return index, depending


def _end_of(
    facts: Facts, end: End, statements: Sequence[Statement], tainted: Sequence[Set[str]]
) -> tuple[int, ast.expr]:
    term = facts.term
    if end.line == RETURN and statements and statements[-1].target is None:
        value = _first_tainted(statements[-1].value, tainted[-2], term)
        if not is_tainted(value, tainted[-2], term):
            raise NotLiftedError(UNRETURNED)
        return len(statements) - 1, value
    if end.line >= 0:
        for number in range(len(statements) - 1, -1, -1):
            statement = statements[number]
            if statement.line == end.line:
                if statement.target is None or term.place == "logged":  # a return, or a call that logs
                    return number, _first_tainted(statement.whole, tainted[number], term)
                return number, statement.whole
        raise NotLiftedError(UNREACHED_END)
    for number in range(len(statements) - 1, -1, -1):
        statement = statements[number]
        if facts.holds(statement.value) and not statement.loop:
            last = meeting_of_all(facts, statements, number)
            statement = statements[last]
            # Go on as long as what is assigned keeps its name: kl = …; kl = kl.clamp(…), and its tokens: not kl[mask].
            for later in range(last + 1, len(statements)):
                if statements[later].target == statement.target and statement.target is not None:
                    if isinstance(value := statements[later].value, ast.Subscript) and is_mask(chain(value.slice)):
                        break
                    last = later
            value = statements[last].whole
            if end.name == "loss" and (statements[last].quiet or is_logged(value)):
                raise NotLiftedError(DETACHED)
            if term.whole and not any(f"{word}(" in ast.unparse(value) for word in ("sum", "kl_divergence")):
                value = ast.Call(ast.Attribute(value, "sum", ast.Load()), [ast.Constant(-1)], [])
            return last, value
    raise NotLiftedError(UNREACHED_TERM)


def _first_tainted(node: ast.expr, tainted: Set[str], term: Term) -> ast.expr:
    """Return the first item of a tuple, or of a dict that is logged, that the term flows into; else the whole."""
    items = node.elts if isinstance(node, ast.Tuple) else []
    if term.place == "logged" and isinstance(node, ast.Dict):
        named = [value for key, value in zip(node.keys, node.values, strict=True) if says_kl(_text(key))]
        items = named or node.values
    found = next((item for item in items if is_tainted(item, tainted, term)), None)
    return (items[0] if items else node) if found is None else _first_tainted(found, tainted, term)


def _text(key: ast.expr | None) -> str:
    return str(key.value) if isinstance(key, ast.Constant) else ""
