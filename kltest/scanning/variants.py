"""The variants of a term: each once, from wherever it was found, with the program that is graded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kltest.errors import KltestError
from kltest.scanning.entries import Entry
from kltest.scanning.forms import form_of, signature, worth
from kltest.scanning.lifting import REWARDS, Lifted, Lifting, asked, choices, contradicted, names
from kltest.scanning.parts import Part
from kltest.scanning.rows import NAME, UNMASKED
from kltest.scanning.unfolding import Assumed
from kltest.symbolic.roles import is_counter
from kltest.symbolic.values import INPUT, Graph, Node, reached
from kltest.symbolic.written import formula, program

PLACES = ("loss", *REWARDS, "helper", "logged")
MOST = 48
"""Variants of one term that are told."""


@dataclass(eq=False)
class Variant:
    """One variant of a term as it is told and graded.

    Attributes:
        place: loss, reward, advantage, helper or logged.
        name: its configuration.
        key: what tells terms apart that compute something else.
        worth: what tells those apart that have other values, whatever their gradient.
        program: a function of rollout fields; the empty string if there is none, and `why` says so.
        used: functions of the tree that put it there.
        called: false if others of the term reach a loss, and this one does not.
        against: by the function from which it was found, the options that have another default there, in words, and
            those without a known one.
    """

    place: str
    name: str
    key: str
    worth: str = ""
    program: str = ""
    formula: str = ""
    form: str = ""
    why: str = ""
    notes: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    called: bool = True
    against: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    sides: frozenset[str] = frozenset()
    assumed: Assumed = ()
    entry: str = ""
    whole: bool = True

    def learn(self, other: "Variant") -> None:
        """Take over what is known of the defaults of another variant that is this one: its nearest ones of each use."""
        for use, against in other.against.items():
            self.against[use] = min(self.against.get(use, against), against, key=_nearest)


def defaults(variant: Variant, variants: Sequence[Variant]) -> dict[str, list[str]]:
    """Return, for each use that a variant is the default of, the options that make it that, in words."""
    found = {}
    for use, (own, _) in variant.against.items():
        there = [one.against[use][0] for one in variants if use in one.against]
        others = dict.fromkeys(words for one in there for words in one if words not in own)
        if others and all(set(own) <= set(one) for one in there):
            found[use] = list(others)
    return found


def _nearest(against: tuple[list[str], list[str]]) -> tuple[int, int]:
    """Order what is said of defaults: fewest that are others first, then fewest that are not known."""
    others, unknown = against
    return len(others), len(unknown)


def told(made: Sequence[Variant]) -> list[Variant]:
    """Return the variants of a term, each once for each place that it comes to, of those from all entries."""
    best: dict[tuple[str, str], list[Variant]] = {}
    if any(one.place == "advantage" and not one.program for one in made):
        # A reward, or a token's own advantage? Of the term alone nothing says which.
        made = [one for one in made if one.place != "reward" or one.whole]
    for one in made:
        best.setdefault((one.place, one.key), []).append(one)
    found = sorted((_best(group) for group in best.values()), key=lambda one: PLACES.index(one.place))
    used = any(one.place != "helper" and one.program for one in found)
    for one in found:
        one.called = one.place != "helper" or not used
    found = [one for one in found if one.called or one.program]
    if any(one.place == "reward" and one.program for one in found):  # what becomes of it then is known by that
        found = [one for one in found if one.place != "advantage" or one.program]
    for place in PLACES:
        there = [one for one in found if one.place == place]
        for one, name in zip(there, names([one.choices for one in there]), strict=True):
            one.name = name
    return found[:MOST]


def _best(group: list[Variant]) -> Variant:
    """Return the best of several that are one: graded, with what becomes of it, and named by its own function."""
    best = min(group, key=lambda one: (not one.program, not one.whole, len(one.program)))
    own: dict[str, list[dict[str, str]]] = {}
    for one in group:  # what is chosen in all configurations from one entry makes it what it is
        own.setdefault(one.entry, []).append(one.choices)
    best.choices = min(map(_common, own.values()), key=len)
    best.used = sorted({use for one in group for use in one.used})
    for one in group:
        best.learn(one)
    return best


def _common(configurations: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what is chosen in all configurations: of an option that has several values there, those."""
    found: dict[str, str] = {}
    for name in configurations[0]:
        if any(name not in one for one in configurations):
            continue
        said = list(dict.fromkeys(one[name] for one in configurations))
        values = [words.removeprefix(f"{name}=") for words in said if words.startswith(f"{name}=")]
        others = [words.removeprefix(f"{name} ") for words in said if words == f"{name} otherwise"]
        if len(said) == 1:
            found[name] = said[0]
        elif len(said) == len([*values, *others]):
            each = dict.fromkeys(one for several in values for one in several.split(" or "))
            found[name] = f"{name}={' or '.join([*each, *others])}"
    return found


def made(
    entry: Entry, part: Part, place: str, settings: Mapping[str, Any], lines: tuple[str, int, int]
) -> Iterator[Variant]:
    """Yield the variants of a term as it was found from one entry; `lines` are those of the function it stands in."""
    known = asked(entry.graph, *lines)
    use = f"{entry.title}, {entry.source.place(entry.function.definition.lineno)}"
    for one in Lifting(entry.unfolding, settings).of(part, place):
        notes = [note for note in one.notes if note != UNMASKED]
        may_be_loose = UNMASKED in one.notes or not entry.sees_masks
        if may_be_loose and one.node is not None and "mask" not in fields(one.node).values():
            notes.append(UNMASKED)
        variant = Variant(
            place,
            "",
            "",
            why=one.refused,
            notes=notes,
            choices=choices(one.assumed, known, entry.graph),
            assumed=one.assumed,
        )
        variant.used = [use] if place not in ("helper", "logged") else []
        against = [contradicted(assumed, entry.graph, settings) for assumed in (one.assumed, *one.others)]
        variant.against = {use: min(against, key=_nearest)}
        variant.whole, variant.entry, variant.sides = one.whole, entry.title, entry.roles.of(part.core).sides
        _write(variant, one)
        if entry.failure:
            variant.program, variant.why = "", entry.failure
        variant.key = variant.key or one.refused
        yield variant


def _write(variant: Variant, lifted: Lifted) -> None:
    """Write the program, the formula and the form of a variant."""
    if lifted.core is None or lifted.node is None:
        return
    try:
        variant.key, variant.worth = signature(lifted.core), worth(lifted.core)
        graded = _beside_nothing(lifted.node) if variant.place == "logged" else lifted.node
        variant.program = program(graded, fields(lifted.node), NAME)
        variant.formula = formula(lifted.node, fields(lifted.node))
        variant.form = form_of(lifted.core)
        if not variant.form and variant.place in REWARDS:
            variant.form = form_of(Graph().node("negated", lifted.core))
    except KltestError as error:
        variant.why = str(error)
    named = [name.replace("topk_", "") for name in fields(lifted.node).values() if "log" in name]
    sides = {name.removesuffix("logits").removesuffix("logp") for name in named}
    if len(sides) < 2:
        variant.program, variant.why = "", "both sides look like one: nothing says whose probabilities are which"
    elif variant.place in ("loss", "helper") and "" not in sides:
        variant.program, variant.why = "", "nothing of the policy is in it"


def _beside_nothing(node: Node) -> tuple[Node, dict[str, Node]]:
    """Return a number as a loss of zero logs it."""
    _, policy = min((name, one) for one, name in fields(node).items() if "log" in name)
    return Graph().node("*", 0.0, Graph().node("sum", policy)), {"kl": node}


def fields(node: Node) -> dict[Node, str]:
    """Return the inputs of a function by their names."""
    inputs = [one for one in reached(node) if one.operation == INPUT and not is_counter(one)]
    return {one: str(one.arguments[0]) for one in sorted(inputs, key=lambda one: one.number)}
