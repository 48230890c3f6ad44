"""Finding KL terms by syntax: where the log-probs of two sides meet and reach a loss or a reward."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kltest.scanning.flows import DIVERGENCE, KL_LIKE, LOG_RATIO, OTHER, RATIO, SHIFTED, Seed
from kltest.scanning.sides import METRICS, REFERENCE, chain, says, says_kl, words
from kltest.scanning.sources import Source
from kltest.scanning.tree import Arrival, Followed, Function, Tree

LINEAR = (LOG_RATIO, SHIFTED)


@dataclass
class Term:
    """A KL term as found: its function, its seeds, and its place: loss, reward, both or helper."""

    function: Function
    seeds: list[Seed]
    place: str
    forms: frozenset[str]
    uses: list[str] = field(default_factory=list)
    detached: bool = False
    shaped: "list[Function]" = field(default_factory=list)

    @property
    def first(self) -> int:
        return min(seed.first for seed in self.seeds)

    @property
    def last(self) -> int:
        return max(seed.last for seed in self.seeds)

    @property
    def parts(self) -> list[tuple[Source, int, int]]:
        """Return the lines of the term: its own, and those of helpers that shape it."""
        own = (self.function.source, self.first, self.last)
        return [own, *((helper.source, helper.line, helper.last) for helper in self.shaped)]


def terms(tree: Tree) -> list[Term]:
    """Return the KL terms of a tree, in the order of files and lines."""
    return _Terms(tree).all()


class _Terms:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def all(self) -> list[Term]:
        """Return the KL terms of the tree, in the order of files and lines."""
        read = self._names_read()
        found = [term for function in self.tree.functions for term in self._inline(function, read)]
        helpers = [helper for function in self.tree.functions if (helper := self._helper(function))]
        inside = {(term.function, seed) for term in found for seed in term.seeds}
        for helper in helpers:
            if (helper.function, helper.seeds[0]) not in inside and self._is_used(helper, read):
                found.append(helper)
        order = {id(source): number for number, source in enumerate(self.tree.sources)}
        return sorted(found, key=lambda term: (order[id(term.function.source)], term.first))

    def _names_read(self) -> dict[str, str]:
        """Return the names of stored KL terms that some function puts into a loss or a reward, with that place."""
        read: dict[str, str] = {}
        for function in self.tree.functions:
            for arrival in self.tree.followed(function).arrivals:
                seed = arrival.flow.seed
                if (seed.named or says_kl(seed.parameter)) and arrival.kind in ("loss", "reward"):
                    read[seed.named or seed.parameter] = arrival.kind
        return read

    def _inline(self, function: Function, read: Mapping[str, str]) -> Iterator[Term]:
        followed = self.tree.followed(function)
        for seeds, arrivals in _clusters(followed.arrivals):
            ratios = {a.flow.seed for a in arrivals if a.flow.form == RATIO and a.kind in ("loss", "reward", "return")}
            own = [a for a in arrivals if _is_kl(a, followed, ratios) and not self._only_logged(function, a)]
            places = {_place(a, read) for a in own} & {"loss", "reward"}
            if places == {"reward"} and any(a.flow.form == OTHER and a.kind == "loss" for a in arrivals):
                continue  # the implicit reward of a preference, which enters the loss through a sigmoid
            if not places:
                continue
            called = {seed: callee for callee, seed in followed.calls}
            if all(seed in called for seed in seeds):
                together = {(seed.first, called[seed]) for seed in seeds}
                if len(together) == len({line for line, _ in together}):
                    continue  # a call of a helper is a use of it; two in one statement are a term
            else:
                seeds = [seed for seed in seeds if seed not in called]
            shaped = list(dict.fromkeys(callee for callee, seed in followed.shaped if seed in seeds))
            place = places.pop() if len(places) == 1 else "both"
            forms = frozenset(a.flow.form for a in own)
            yield Term(function, seeds, place, forms, [], all(a.detached for a in own), shaped)

    def _only_logged(self, function: Function, arrival: Arrival, depth: int = 0) -> bool:
        """Return True if what it is assigned to is a local name that goes into what is logged and nowhere else."""
        if arrival.kind not in ("loss", "reward") or depth > 3:
            return False
        stores = [n for n in ast.walk(function.node) if isinstance(n, ast.Name) and n.id == arrival.name]
        return bool(stores) and _is_only_logged(function.node, arrival.name, set())

    def _helper(self, function: Function) -> Term | None:
        followed = self.tree.followed(function)
        seeds: list[Seed] = []
        forms: set[str] = set()
        for arrival in followed.arrivals:
            seed = arrival.flow.seed
            if arrival.kind != "return" or seed.parameter or seed.named:
                continue
            if not _is_kl(arrival, followed, set(), function.name):
                continue
            if seed not in seeds and seed not in {s for _, s in followed.calls}:
                seeds.append(seed)
            forms.add(arrival.flow.form)
        shaped = list(dict.fromkeys(callee for callee, seed in followed.shaped if seed in seeds))
        return Term(function, seeds, "helper", frozenset(forms), shaped=shaped) if seeds else None

    def _is_used(self, helper: Term, read: Mapping[str, str]) -> bool:
        """Return True if a helper is called nowhere, or where what it returns reaches a loss or a reward."""
        called = False
        for function in self.tree.functions:
            followed = self.tree.followed(function)
            for callee, seed in followed.calls:
                if callee is not helper.function:
                    continue
                called = True
                helper.uses.append(function.source.place(seed.first))
        if not called:
            return True
        return any(self._reaches(function, helper.function, read, set()) for function in self.tree.functions)

    def _reaches(self, function: Function, callee: Function, read: Mapping[str, str], seen: set[Function]) -> bool:
        followed = self.tree.followed(function)
        for called, seed in followed.calls:
            if called is not callee:
                continue
            arrivals = [arrival for arrival in followed.arrivals if arrival.flow.seed is seed]
            if REFERENCE not in seed.who and any(arrival.flow.form == RATIO for arrival in arrivals):
                continue
            for arrival in arrivals:
                if arrival.flow.form == RATIO:
                    continue
                if _place(arrival, read) in ("loss", "reward"):
                    return True
                if arrival.kind == "return" and function not in seen:
                    callers = [other for other in self.tree.functions if other is not function]
                    if any(self._reaches(other, function, read, {*seen, function}) for other in callers):
                        return True
        return False


def _clusters(arrivals: Iterable[Arrival]) -> list[tuple[list[Seed], list[Arrival]]]:
    """Group arrivals by the seeds that meet in them: those of one k3 written out are one term."""
    groups: list[tuple[list[Seed], list[Arrival]]] = []
    for arrival in arrivals:
        seed = arrival.flow.seed
        if seed.parameter or seed.named:
            continue
        for seeds, members in groups:
            if any(s is seed or _together(s, seed, members, arrival) for s in seeds):
                members.append(arrival)
                if seed not in seeds:
                    seeds.append(seed)
                break
        else:
            groups.append(([seed], [arrival]))
    return groups


def _together(one: Seed, other: Seed, members: Sequence[Arrival], arrival: Arrival) -> bool:
    """Return True for two meetings of the same sides, near each other, that arrive at one place in one form."""
    if one.who != other.who or abs(one.first - other.first) > (40 if arrival.flow.form == DIVERGENCE else 12):
        return False
    return any(a.flow.seed is one and (a.line, a.flow.form) == (arrival.line, arrival.flow.form) for a in members)


def _is_kl(arrival: Arrival, followed: Followed, ratios: set[Seed], name: str = "") -> bool:
    """Return True for a divergence by its form or its name, or for a log-ratio to a reference.

    Between policy and sampler alone, it is one only if it is called so, and a log-ratio if it is no importance ratio.
    """
    flow = arrival.flow
    named = says_kl(arrival.name) or says_kl(name) or flow.seed in followed.kl_named
    if says(arrival.name, "implicit"):
        return False
    if REFERENCE not in flow.seed.who:
        return named and (flow.form in KL_LIKE or (flow.form in LINEAR and flow.seed not in ratios))
    if flow.form in KL_LIKE:
        return True
    return flow.form in LINEAR and (named or arrival.kind != "return")


def _is_only_logged(node: ast.AST, name: str, seen: set[str]) -> bool:
    """Return True if every statement of a function that reads a name only logs it, under another name perhaps."""
    if name in seen:
        return True
    reads = False
    for statement in ast.walk(node):
        if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
            continue
        value = statement.value
        if value is None or not any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(value)):
            continue
        reads = True
        if isinstance(statement, ast.Return):
            return False
        if isinstance(statement, ast.Expr):
            told = chain(value.func) if isinstance(value, ast.Call) else ""
            if not METRICS.intersection(words(told)):
                return False
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            told = chain(target)
            if isinstance(target, ast.Name):
                if target.id != name and not _is_only_logged(node, target.id, {*seen, name}):
                    return False
            elif not METRICS.intersection(words(told)):
                return False
    return reads


def _place(arrival: Arrival, read: Mapping[str, str]) -> str:
    if arrival.kind == "stored":
        return read.get(arrival.name, "logged")
    return arrival.kind
