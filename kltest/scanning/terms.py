"""Finding KL terms by syntax: where the log-probs of two sides meet and reach a loss or a reward."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kltest.scanning.callees import Function
from kltest.scanning.flows import DIVERGENCE, FULL, KL_LIKE, LOG_RATIO, OTHER, RATIO, SHIFTED, Flow, Seed
from kltest.scanning.sides import MIXED, REFERENCE
from kltest.scanning.sources import Source
from kltest.scanning.syntax import chain
from kltest.scanning.tree import Arrival, Followed, Tree
from kltest.symbolic.words import METRICS, is_preference, says, says_kl, words

LINEAR = (LOG_RATIO, SHIFTED)


@dataclass
class Term:
    """A KL term as found: its function, its seeds, and its place: loss, reward, both, helper or logged.

    `reached` is where the callers of a helper put it: loss, reward, entry. `mixed` is true for calls in several places.
    """

    function: Function
    seeds: list[Seed]
    place: str
    flows: frozenset[Flow]
    shaped: list[Function]
    reached: frozenset[str] = frozenset()
    mixed: bool = False

    @property
    def forms(self) -> frozenset[str]:
        """Return the forms in which its seeds arrive."""
        return frozenset(flow.form for flow in self.flows)

    def forms_of(self, lines: Iterable[int]) -> frozenset[str]:
        """Return the forms in which those of its seeds arrive that stand on some lines; all forms if none does."""
        seeds = [seed for seed in self.seeds if any(seed.first <= line <= seed.last for line in lines)]
        return frozenset(flow.form for flow in self.flows if flow.seed in seeds) or self.forms

    @property
    def whole(self) -> bool:
        """Return True for a term over all of the vocabulary."""
        return self.forms <= {FULL, DIVERGENCE}

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

    def holds(self, *nodes: ast.AST) -> bool:
        """Return True if a seed stands in one of these nodes."""
        operations = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.BinOp | ast.Call)]
        spans = {(getattr(n, "lineno", 0), getattr(n, "end_lineno", None) or 0) for n in operations}
        return any(seed.first <= first and last <= seed.last for seed in self.seeds for first, last in spans)


def terms(tree: Tree, *, logged: bool = False) -> list[Term]:
    """Return the KL terms of a tree, in the order of files and lines; with `logged` those that are only logged, too."""
    return _Terms(tree, logged).all()


class _Terms:
    """Finds terms; `read` are the names of stored KL terms that some function puts into a loss or a reward, with that
    place, `callers` the calls of each function."""

    def __init__(self, tree: Tree, logged: bool) -> None:
        self.tree, self.logged = tree, logged
        self.read: dict[str, str] = {}
        self.callers: dict[Function, list[tuple[Function, Seed]]] = {}
        for function in tree.functions:
            followed = tree.followed(function)
            for arrival in followed.arrivals:
                seed = arrival.flow.seed
                if (seed.named or says_kl(seed.parameter)) and arrival.kind in ("loss", "reward"):
                    self.read[seed.named or seed.parameter] = arrival.kind
            for callee, seed in followed.calls:
                self.callers.setdefault(callee, []).append((function, seed))

    def all(self) -> list[Term]:
        """Return the KL terms of the tree, in the order of files and lines."""
        found = [term for function in self.tree.functions for term in self._inline(function)]
        inside = {seed for term in found for seed in term.seeds}
        for function in self.tree.functions:
            helper = self._helper(function)
            reached = self._reached(function, set()) if helper else set()
            # One that is called nowhere is somebody's entry, unless it is a log-ratio to a sampler, which may be that
            # of a clip; else it is a term if it reaches a loss or a reward.
            if (
                helper
                and helper.seeds[0] not in inside
                and (
                    reached
                    if function in self.callers
                    else helper.forms & KL_LIKE or any(REFERENCE in seed.who for seed in helper.seeds)
                )
            ):
                helper.reached = frozenset(reached)
                found.append(helper)
        order = {id(source): number for number, source in enumerate(self.tree.sources)}
        return sorted(found, key=lambda term: (order[id(term.function.source)], term.first))

    def _inline(self, function: Function) -> Iterator[Term]:
        followed = self.tree.followed(function)
        for seeds, arrivals in _clusters(function, followed.arrivals):
            ratios = {a.flow.seed for a in arrivals if a.flow.form == RATIO and a.kind in ("loss", "reward", "return")}
            own = [a for a in arrivals if _is_kl(a, followed, ratios) and not _ends_in_logs(function, a)]
            places = {self._place(a) for a in own} & {"loss", "reward"}
            if places == {"reward"} and any(
                is_preference(a.name) or (a.flow.form == OTHER and a.kind == "loss") for a in arrivals
            ):
                continue  # the implicit reward of a preference, which enters the loss through a sigmoid
            if self.logged and not places and self._is_logged(function, arrivals):
                yield Term(function, seeds, "logged", frozenset(a.flow for a in arrivals), _shaped(followed, seeds))
            if not places or (places == {"reward"} and self._is_preferred(function)):
                continue
            made = {a.flow.seed for a in own if a.kind == "reward" and a.flow.seed.first <= a.line <= a.flow.seed.last}
            if "reward" in places and all(seed.quiet or seed in made for seed in seeds):
                places = {"reward"}  # through the advantage, it comes to the loss as a number
            called = {seed: callee for callee, seed in followed.calls}
            if all(seed in called for seed in seeds):
                if not _is_mixture(function, seeds, called):
                    continue  # a call of a helper is a use of it; two that are mixed are a term
            else:
                seeds = [seed for seed in seeds if seed not in called]
            place = places.pop() if len(places) == 1 else "both"
            term = Term(function, seeds, place, frozenset(a.flow for a in own), _shaped(followed, seeds))
            yield replace(term, mixed=len({called.get(seed) and seed.first for seed in seeds} - {None}) > 1)

    def _is_logged(self, function: Function, arrivals: Sequence[Arrival]) -> bool:
        """Return True for what is called a KL to the reference, is logged, and arrives nowhere else."""
        named = self.tree.followed(function).kl_named
        return (
            all(REFERENCE in a.flow.seed.who for a in arrivals)
            and any(says_kl(a.name) or a.flow.seed in named for a in arrivals)
            and all(self._place(a) == "logged" or _ends_in_logs(function, a) for a in arrivals)
        )

    def _helper(self, function: Function) -> Term | None:
        followed = self.tree.followed(function)
        own = [
            a
            for a in followed.arrivals
            if a.kind == "return"
            and not (a.flow.seed.parameter or a.flow.seed.named)
            and _is_kl(a, followed, set(), function.name)
        ]
        called = {seed: callee for callee, seed in followed.calls}
        seeds = list(dict.fromkeys(a.flow.seed for a in own))
        mixed = _is_mixture(function, seeds, called)
        if not mixed:
            seeds = [seed for seed in seeds if seed not in called]
        flows, shaped = frozenset(a.flow for a in own), _shaped(followed, seeds)
        return Term(function, seeds, "helper", flows, shaped, mixed=mixed) if seeds else None

    def _is_preferred(self, function: Function) -> bool:
        """Return True for a function whose callers weigh what it returns against a preference, or only call it KL."""
        arrivals = [
            a
            for caller, seed in self.callers.get(function, ())
            for a in self.tree.followed(caller).arrivals
            if a.flow.seed is seed and a.kind != "logged"
        ]
        preferred = [a for a in arrivals if a.flow.form == OTHER or is_preference(a.name)]
        return bool(preferred) and all(a in preferred or says_kl(a.name) for a in arrivals)

    def _reached(self, callee: Function, seen: set[Function]) -> set[str]:
        """Return where what a function returns arrives, loss, reward or entry, through its callers perhaps."""
        seen.add(callee)
        places: set[str] = set()
        for function, seed in self.callers.get(callee, ()):
            arrivals = [arrival for arrival in self.tree.followed(function).arrivals if arrival.flow.seed is seed]
            other = [arrival for arrival in arrivals if arrival.flow.form != RATIO]
            if REFERENCE not in seed.who and len(other) < len(arrivals):
                continue
            here = {self._place(arrival) for arrival in other} & {"loss", "reward"}
            returned = [arrival.flow.form for arrival in other if arrival.kind == "return"]
            places |= here
            if KL_LIKE.intersection(returned) and function not in self.callers and not here:
                places.add("entry")  # somebody's
            elif returned and function not in seen:
                places |= self._reached(function, seen)
        return places

    def _place(self, arrival: Arrival) -> str:
        return self.read.get(arrival.name, "logged") if arrival.kind == "stored" else arrival.kind


def _is_mixture(function: Function, seeds: Sequence[Seed], called: Mapping[Seed, Function]) -> bool:
    """Return True for calls of several helpers in one statement, or in a function that is called a divergence."""
    if not all(seed in called for seed in seeds):
        return False
    together = {(0 if says_kl(function.name) else seed.first, called[seed]) for seed in seeds}
    return len(together) > len({line for line, _ in together})


def _shaped(followed: Followed, seeds: Sequence[Seed]) -> list[Function]:
    return list(dict.fromkeys(callee for callee, seed in followed.shaped if seed in seeds))


def _clusters(function: Function, arrivals: Iterable[Arrival]) -> list[tuple[list[Seed], list[Arrival]]]:
    """Group arrivals by the seeds that meet in them: those of one k3 written out, and those of alternative branches
    that arrive at one place, are one term."""
    groups: list[tuple[list[Seed], list[Arrival]]] = []
    for arrival in arrivals:
        seed = arrival.flow.seed
        if seed.parameter or seed.named:
            continue
        meeting = [
            each for each in groups if any(s is seed or _together(function, s, seed, each[1], arrival) for s in each[0])
        ]
        seeds, members = meeting[0] if meeting else ([], [])
        for other in meeting[1:]:
            seeds += other[0]
            members += other[1]
            groups.remove(other)
        if not meeting:
            groups.append((seeds, members))
        members.append(arrival)
        if seed not in seeds:
            seeds.append(seed)
    return groups


def _together(function: Function, one: Seed, other: Seed, members: Sequence[Arrival], arrival: Arrival) -> bool:
    """Return True for two meetings of the same sides, near each other, that arrive at one place in one form, or in
    alternative branches."""
    apart = abs(one.first - other.first)
    if (one.who != other.who and MIXED not in one.who & other.who) or apart > 40:
        return False
    there = [a for a in members if a.flow.seed is one and a.line == arrival.line]
    if any(a.flow.form == arrival.flow.form for a in there) and (apart <= 12 or arrival.flow.form == DIVERGENCE):
        return True
    return any(a.name == arrival.name for a in there) and _are_alternative(function.node, one.first, other.first)


def _are_alternative(node: ast.AST, one: int, other: int) -> bool:
    """Return True if two lines stand in different branches of one condition."""
    first, last = sorted((one, other))
    return any(
        isinstance(inner, ast.If)
        and inner.orelse
        and inner.body[0].lineno <= first < inner.orelse[0].lineno <= last
        and last <= (inner.end_lineno or 0)
        for inner in ast.walk(node)
    )


def _is_kl(arrival: Arrival, followed: Followed, ratios: set[Seed], name: str = "") -> bool:
    """Return True for a divergence by its form or its name, or for a log-ratio to a reference.

    Between policy and sampler alone, it is one only if it is called so, and a log-ratio if it is no importance ratio.
    """
    flow = arrival.flow
    named = says_kl(arrival.name) or says_kl(name) or flow.seed in followed.kl_named
    if says(arrival.name, "implicit"):
        return False
    if not flow.seed.who & {REFERENCE, MIXED}:
        return named and (flow.form in KL_LIKE or (flow.form in LINEAR and flow.seed not in ratios))
    if flow.form in KL_LIKE:
        return True
    return flow.form in LINEAR and (named or arrival.kind != "return")


def _ends_in_logs(function: Function, arrival: Arrival) -> bool:
    """Return True if what it is assigned to is a local name that goes into what is logged and nowhere else."""
    return arrival.kind in ("loss", "reward") and _is_only_logged(function, arrival.name, set())


def _is_only_logged(function: Function, name: str, seen: set[str]) -> bool:
    """Return True if every statement of a function that reads a name only logs it, under another name perhaps."""
    if name in seen:
        return True
    for statement in (reading := function.readers.get(name, [])):
        value = statement.value
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
                if target.id != name and not _is_only_logged(function, target.id, {*seen, name}):
                    return False
            elif not METRICS.intersection(words(told)):
                return False
    return bool(reading)
