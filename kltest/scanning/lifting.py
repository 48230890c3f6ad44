"""Terms as functions of rollout fields: each configuration, with fields and numbers in place of what is read."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from kltest.errors import KltestError
from kltest.names import SUPPORT_SIZE
from kltest.scanning.measured import (
    FAILURES,
    FAR,
    NUMBER,
    ROLLOUTS,
    SIZE,
    WORDS,
    Rollouts,
    computed_of,
    filled,
    leaves,
    limits,
    sizes,
    supports,
    temperatures,
    value_of,
)
from kltest.scanning.parts import LIMITS, NEGATIONS, Part, projected, sign
from kltest.scanning.rows import UNMASKED
from kltest.scanning.unfolding import MOST, OPTIONS, Assumed, Case, Unfolding, excluded, text
from kltest.symbolic.computed import UnknownError, evaluate, truth
from kltest.symbolic.roles import INFINITE, MASK, MOVES, PADDING, own_name, parts_of
from kltest.symbolic.values import (
    CHOICE,
    INPUT,
    Graph,
    Node,
    is_constant,
    nodes_in,
    reached,
    under,
    values_of,
    walked,
)
from kltest.symbolic.words import says

COEFFICIENT = ("coef", "beta", "weight", "lambda", "lam", "ctl", "alpha", "penalty", "scale", "eta")
REWARDS = ("reward", "advantage")
MASKS = (MASK, PADDING)
TOLERANCE = 1e-9
TRIED = 6
"""Configurations of what becomes of a term that are tried until one can be computed."""


class NotLiftedError(Exception):
    """A term cannot be lifted; the message says why."""


class _ZeroError(KltestError):
    """A term of which nothing is left: it is multiplied by zero."""


@dataclass
class Lifted:
    """One configuration of a term: the graph of its function, or why there is none.

    Attributes:
        assumed: the conditions that it is the configuration of, and whether they hold.
        node: a function of inputs that are named as fields.
        core: the same of the term alone, without what becomes of it later.
        notes: what was guessed.
        refused: why it was not lifted.
        whole: false if it is the term alone, or of each token, and no number of a batch.
        others: conditions of further configurations in which the term is the same.
    """

    assumed: Assumed
    node: Node | None = None
    core: Node | None = None
    notes: list[str] = field(default_factory=list)
    refused: str = ""
    whole: bool = True
    others: list[Assumed] = field(default_factory=list)


class Lifting:
    """Lifts the terms of one entry.

    Args:
        unfolding: of its graph.
        settings: defaults of options by their name.
    """

    def __init__(self, unfolding: Unfolding, settings: Mapping[str, Any]) -> None:
        self.unfolding, self.settings = unfolding, settings
        self.roles, self.graph = unfolding.roles, unfolding.graph
        self._assumed: Assumed = ()

    def of(self, part: Part, place: str) -> Iterator[Lifted]:
        """Yield the configurations of a term as it comes to the loss or reward; alone, where that is not known."""
        whole, branches = projected(self.graph, part)
        positive = sign(part) > 0
        if excluded(branches, branches) or any(holds and self.unfolding.is_impossible(one) for one, holds in branches):
            return
        known = self.unfolding.decided
        branches = tuple(one for one in branches if one[0].operation != "call" or known(one[0]) is not one[1])
        for case in list(self.unfolding.cases(part.core, branches)):
            if not isinstance(case.node, Node) or len(self.roles.of(case.node).sides) < 2:
                continue
            found = Lifted(case.assumed, others=case.others)
            self._assumed = case.assumed
            configurations = islice(self.unfolding.cases(whole, case.assumed), MOST)
            outer = list(islice((one for one in configurations if _is_in({case.node, part.core}, one)), TRIED))
            if not outer:
                continue
            outer.sort(key=lambda one: len(contradicted(one.assumed, self.graph, self.settings)[0]))  # defaults first
            core = case.node if positive else self.graph.node("negated", case.node)
            try:
                if place == "helper" and {False} in (self.roles.flows(core), self.roles.flows(part.root)):
                    raise NotLiftedError("it carries no gradient, and nothing says what becomes of it")
                found.core = self.filled(core, [], selected=True)
                self._place(found, core, outer, place)
            except NotLiftedError as error:
                found.refused = str(error)
            except UnknownError as error:
                if error.node.operation == "raises":  # no configuration in which anything is computed
                    continue
                found.refused = f"nothing says what {name_of(error.node)} is"
            except _ZeroError:
                continue
            except FAILURES as error:
                if isinstance(error, TypeError) and "NoneType" in str(error):  # it would raise there as well
                    continue
                found.refused = _failed(error)
            yield found

    def _place(self, found: Lifted, core: Node, outer: Iterable[Case], place: str) -> None:
        """Lift what becomes of a term: the first of its configurations that can be computed; else the term alone.

        One in which it has a gradient goes before those that cut it off.
        """
        why, zero, cut = "", None, None
        for one in outer:
            found.notes = []
            try:
                scored = self.graph.rewritten(one.node, self._of_tokens) if place in REWARDS else one.node
                found.node = self.filled(scored, found.notes, loops=place not in REWARDS)
                if place in REWARDS and not computed_of(found.node, Rollouts(2)).dim():
                    raise NotLiftedError("one number of all rollouts is a statistic, and none's reward")
                if place in REWARDS and found.core and not _fields(found.core) <= _fields(found.node):
                    raise NotLiftedError("what is made of it does not say whose probabilities are which")
                if place in REWARDS or computed_of(found.node, Rollouts(2)).requires_grad:
                    break
                cut = cut or (found.node, found.notes)
            except _ZeroError as error:
                zero = error
            except (*FAILURES, NotLiftedError) as error:
                why = why or (str(error) if isinstance(error, NotLiftedError) else _failed(error))
        else:
            if cut:
                found.node, found.notes = cut
            elif zero and not why:
                raise zero
            elif place in ("advantage", "logged"):  # of a token, or of all that follow it? of which number?
                raise NotLiftedError(f"nothing says what becomes of it: {why}")
            else:
                found.notes = [f"only the term itself, without what becomes of it: {why}"]
                found.node, found.whole = self.filled(core, found.notes), False
        if place == "loss" and computed_of(found.node, Rollouts(2)).dim():
            found.whole = False
        if place in REWARDS:
            found.node = self.graph.node("negated", found.node)

    def _of_tokens(self, node: Node) -> Any:
        """Return what is selected with a mask as a number of each token, which is 0 where the mask is."""
        match node.operation, node.arguments:
            case "item" | "masked_select", (owner, Node() as mask) if self.roles.of(mask).quantity in MASKS:
                return self.graph.node("*", owner, mask)
        return node

    def filled(self, node: Node, notes: list[str], *, loops: bool = True, selected: bool = False) -> Node:
        """Return a term as a function of inputs that are named as fields; it is computed once.

        `loops` that run over nothing of a rollout may be followed for one pass: over batches, which add up, but not
        over tokens, of which each gets what comes after it. The tokens that a mask selects may stay `selected`, one
        after the other, else they keep their places.

        Raises what torch does if it cannot be computed, and NotLiftedError where a number is not known.
        """
        for end in leaves(self.roles, node, shaped=False).unknown:
            if self.roles.of(end).sides:
                raise KltestError(f"nothing says what {name_of(end)} does")
        try:
            made = self._filled(node, notes, shaped=True)
            if not selected:
                shape = computed_of(made, Rollouts(2)).shape
                if len(shape) == 1 and shape[0] != ROLLOUTS:
                    raise KltestError("it is one number for each token that a mask selects")
            return made
        except _ZeroError:
            raise
        except FAILURES:
            if not loops and any(one.operation == "loop" for one in reached(node)):
                raise
            return self._filled(node, notes, shaped=False)

    def _filled(self, node: Node, notes: list[str], *, shaped: bool) -> Node:
        found: list[str] = []
        ends = leaves(self.roles, node, shaped=shaped).unknown
        unknown = [one for one in ends if self.roles.of(one).quantity != INFINITE]
        several = supports(node)
        counts: dict[Node, Any] = {end: self.graph.node(INPUT, SIZE) for end in unknown if end in several}
        found += [f"{name_of(end)} is taken to be {SUPPORT_SIZE}" for end in counts]
        lengths = {end: 1 for end in unknown if end in sizes(node) - several}
        found += [f"{name_of(end)} is taken to be 1" for end in lengths]
        counts |= lengths
        slots = {end: self.graph.node(INPUT, NUMBER, at) for at, end in enumerate(unknown) if end not in counts}
        open_ = filled(self.roles, node, {**slots, **counts}, shaped=shaped)
        numbers = {end: self._number(node, end, open_, slot, found) for end, slot in slots.items()}
        by_slot = {slots[end]: value for end, value in numbers.items()}
        made = self.graph.rewritten(open_, lambda one: by_slot.get(one, one))
        if not isinstance(made, Node):
            raise KltestError("it is a constant")
        if _is_zero(made):  # or 0 / 0: masks of padding that are none
            made = filled(self.roles, node, {**numbers, **counts}, shaped=shaped, padded=False)
            if _is_zero(made):
                raise _ZeroError("it is zero")
        notes += found
        shape = computed_of(made, Rollouts(2)).shape
        if shape[-1:] == (WORDS,):
            return self.graph.node("sum", made, dim=-1)
        columns = [at for at, length in enumerate(shape) if at and length == 1]
        return self.graph.node("squeeze", made, dim=columns[0]) if columns else made

    def _number(self, node: Node, number: Node, of_slots: Any, slot: Node, notes: list[str]) -> Any:
        """Return what stands for a number that nothing computes, by what a term is as a function of it."""
        name = name_of(number)
        known = self._default_of(number)
        if _is_limit(node, number):  # whatever it would be beside others that are not known either
            if isinstance(known, int | float):
                notes.append(f"{name} keeps its default, {known!r}")
                return known
            notes.append(f"{name} is taken to limit nothing")
            return limits(node).get(number, FAR)

        def at(value: float) -> float:
            return value_of(of_slots, Rollouts(2), {slot: value}).item()

        try:
            zero = at(0.0)
        except FAILURES:
            zero = math.nan
        try:
            half, one, two = at(0.5), at(1.0), at(2.0)
        except FAILURES:  # it counts something, or has a logarithm
            if not isinstance(known, int | float):
                raise
            notes.append(f"{name} keeps its default, {known!r}")
            return known
        near = TOLERANCE * max(abs(one), abs(two), 1e-3)
        if abs(one - half) < near and abs(one - two) < near:
            return 1.0
        if abs(zero) < near and abs(two - 2 * one) < near:
            if says(name, *COEFFICIENT):
                notes.append(f"{name} is filled as the coefficient")
                if says(name, "weight"):  # of a token, perhaps, and zero where there is none
                    notes.append(UNMASKED)
                return self.graph.node(INPUT, "beta")
            notes.append(f"{name} is taken to be 1")
            return 1.0
        if abs(one - 2 * two) < near:
            notes.append(f"{name} is taken to be 1")
            return 1.0
        if is_constant(known) and known is not None:
            notes.append(f"{name} keeps its default, {known!r}")
            return known
        if number in temperatures(self.roles, node):
            notes.append(f"{name} is taken to be 1")
            return 1.0
        if any(_is_rest_of(number, each) for each in reached(node)):
            notes.append(f"{name} is taken to be 0.5")
            return 0.5
        raise NotLiftedError(f"nothing says what {name} is")

    def _default_of(self, number: Node) -> Any:
        """Return what a number is if nothing says another one; UNSET if that is not known, or would be another case."""
        known = self.graph.defaults.get(number, self.settings.get(own_name(number), UNSET))
        for condition, holds in (one for pair in self._assumed for one in plain(*pair)):
            try:
                if (
                    number in reached(condition)
                    and truth(evaluate([condition], {number: known})[condition]) is not holds
                ):
                    return UNSET
            except FAILURES:
                continue
        return known


def _failed(error: Exception) -> str:
    return f"with rollouts as tensors (B, T) it cannot be computed: {' '.join(str(error).split())[:200]}"


def _is_rest_of(number: Node, node: Node) -> bool:
    """Return True for one minus a number, and for its logarithm."""
    if node.operation == "log1p":
        (inner,) = node.arguments
        other = inner.arguments[0] if isinstance(inner, Node) and inner.operation in NEGATIONS else None
    elif node.operation == "-" and node.arguments[0] in (1, 1.0):
        other = node.arguments[1]
    else:
        return False
    return under(other, MOVES) is number


def _is_limit(node: Node, number: Node) -> bool:
    """Return True for a number that a value is limited to, or that says how far from another."""
    limits = (one for one in reached(node) if one.operation in LIMITS)
    said = (nodes_in((*each.arguments[1:], *(value for _, value in each.named))) for each in limits)
    return any(number in walked(one, parts_of) for one in said)  # but for that of which it has the shape alone


def _fields(node: Node) -> set[str]:
    """Return the probabilities that a function is given."""
    return {one.arguments[0] for one in reached(node) if one.operation == INPUT and "log" in one.arguments[0]}


def _is_zero(node: Node) -> bool:
    rollouts = Rollouts(5, full=True)
    value = value_of(node, rollouts)
    fields = [one for one in rollouts.values.values() if one.requires_grad] if value.requires_grad else []
    gradients = torch.autograd.grad(value, fields, materialize_grads=True) if fields else []
    return not any(bool((one.abs() > TOLERANCE).any()) for one in (value, *gradients))


def _is_in(nodes: set[Node], case: Case) -> bool:
    """Return True for a configuration in which a term is left, or what it was before, in what is not known."""
    return isinstance(case.node, Node) and not nodes.isdisjoint(reached([case.node]))


UNSET = object()


def name_of(node: Node) -> str:
    """Return what a node is called in the code."""
    return text(node) if node.operation in ("attribute", "input") else own_name(node) or text(node)[:80]


def names(configurations: Sequence[Mapping[str, str]]) -> list[str]:
    """Return each configuration in words, by what tells it from the others."""
    telling = {name for one in configurations for name in one if len({other.get(name) for other in configurations}) > 1}
    return [", ".join(words for name, words in one.items() if name in telling and words) for one in configurations]


def plain(condition: Any, holds: bool) -> Iterator[tuple[Node, bool]]:
    """Yield what is chosen with a condition: of `a and b` both, and of what is denied the opposite."""
    if not isinstance(condition, Node):
        return
    first, *branches = condition.arguments if condition.operation == CHOICE else (None,)
    branches = [at == 0 if one is first else one for at, one in enumerate(branches)]
    # A branch that is the opposite is not taken.
    taken = [at for at, one in enumerate(branches) if not (is_constant(one) and bool(one) != holds)]
    if condition.operation == "not":
        yield from plain(condition.arguments[0], not holds)
    elif len(taken) == 1:
        yield from plain(first, taken == [0])
        yield from plain(branches[taken[0]], holds)
    else:
        yield condition, holds


def _said(option: Any) -> str:
    """Return an option in words: of one that is taken from elsewhere if it is None, its name."""
    while isinstance(option, Node) and option.operation == CHOICE:
        option = option.arguments[2]
    return text(option)


def asked(graph: Graph, file: str, first: int, last: int) -> dict[Node, tuple[str, bool]]:
    """Return the conditions by which lines ask whether a variable is None: which, and if it is something then."""
    found: dict[Node, tuple[str, bool]] = {}
    for node, places in graph.asked.items():
        own = [one for (name, line), one in places.items() if name == file and first <= line <= last]
        chosen = list(plain(node, True)) if own else []
        if len(chosen) == 1:
            ((condition, holds),), (name, given) = chosen, own[0]
            found[condition] = name, given == holds
    return found


def choices(case: Sequence[tuple[Node, bool]], known: Mapping[Node, tuple[str, bool]], graph: Graph) -> dict[str, str]:
    """Return what was chosen in a configuration in words, by the option; `known` are those in words of the term."""
    found: dict[str, str] = {}
    others: dict[str, tuple[Any, list[Any]]] = {}
    for condition, holds in (one for pair in case for one in plain(*pair)):
        symbol, values = values_of(condition)
        if condition in known:
            name, given = known[condition]
            found[f"{name} is None"] = f"{'with' if given == holds else 'without'} {name}"
        elif values:
            name = next(iter(graph.names.get(symbol, ())), "") if symbol.operation == CHOICE else ""
            name = name or _said(symbol)
            if holds:
                found[name] = _one_of(name, values)
            else:
                found.setdefault(name, f"{name} otherwise")
                others.setdefault(name, (symbol, []))[1].extend(values)
        elif condition.operation == "is" and condition.arguments[1] is None:
            name = text(condition.arguments[0])
            found[f"{name} is None"] = f"{'without' if holds else 'with'} {name}"
        else:
            name = text(condition)
            found[name] = name if holds else _denied(name)
    for name, (symbol, excluded_) in others.items():
        left = [one for one in graph.options.get(symbol, ()) if one not in excluded_]
        if left and found[name] == f"{name} otherwise":
            found[name] = _one_of(name, left)
    return found


def contradicted(
    case: Sequence[tuple[Node, bool]], graph: Graph, settings: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return the options of a configuration that are others by default, and those without a known default, in words.

    `settings` are defaults beside those of the graph.
    """
    others: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for condition, holds in (one for pair in case for one in plain(*pair)):
        options = sorted((one for one in reached(condition) if one.operation in OPTIONS), key=lambda one: one.number)
        known = {one: graph.defaults.get(one, settings.get(own_name(one), UNSET)) for one in options}
        known = {one: default for one, default in known.items() if default is not UNSET}
        try:
            if truth(evaluate([condition], known)[condition]) is not holds:
                others |= dict.fromkeys(f"{name_of(one)} is {default!r} by default" for one, default in known.items())
        except FAILURES:
            unknown[text(condition) if holds else _denied(text(condition))] = None
    return list(others), list(unknown)


def _denied(words: str) -> str:
    return f"not ({words})" if {"and", "or"}.intersection(words.split()) else f"not {words}"


def _one_of(name: str, values: Sequence[Any]) -> str:
    return f"{name}={' or '.join(map(repr, values))}"
