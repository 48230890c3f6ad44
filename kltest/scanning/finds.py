"""The KL terms of a tree: where each stands, what it becomes there, and in which configurations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kltest.scanning.entries import MODULE, Entry, Place, Tree, names_kl
from kltest.scanning.lifting import REWARDS
from kltest.scanning.measured import FAILURES, Leaves, leaves
from kltest.scanning.parts import Part, Parts
from kltest.scanning.unfolding import excluded
from kltest.scanning.variants import Variant, made
from kltest.symbolic.calls import BACKWARD_OF, branches_of
from kltest.symbolic.values import CHOICE, Node, Thing, nodes_in, reached, under
from kltest.symbolic.words import LOSS, REFERENCE, is_logged, is_loss, is_preference, says, says_kl

NOWHERE = Place(MODULE, 0, 0)
SIGMOIDS = frozenset({"sigmoid", "logsigmoid", "softplus", "log_sigmoid", "binary_cross_entropy_with_logits"})
CALLED = frozenset({"call", "forward", "compute", "apply"})
"""Methods that do what their class is called."""
REWARD = ("reward", "advantage", "adv", "return")


@dataclass(eq=False)
class Find:
    """A term of the tree, with all entries from which it was found.

    Attributes:
        file: where it stands.
        function: the function that it stands in.
        lines: its lines there.
        others: its lines in other functions.
        depends: the lines of what it is computed from, and of what it becomes.
        made: its variants, from each entry.
        starts: the lines of those that stand in its place.
        latest: the entry from which it was found last, and its variants from there.
    """

    file: str
    function: Place
    lines: set[int] = field(default_factory=set)
    others: set[tuple[str, int]] = field(default_factory=set)
    depends: set[tuple[str, int]] = field(default_factory=set)
    made: list[Variant] = field(default_factory=list)
    starts: set[int] = field(default_factory=set)
    latest: tuple[Entry | None, list[Variant]] = (None, [])

    def takes(self, entry: Entry, line: int, variants: list[Variant]) -> bool:
        """Return True for what begins on the same line, or only where all of the others do not."""
        last, others = self.latest
        return line in self.starts or (
            last is entry and all(excluded(one.assumed, other.assumed) for one in variants for other in others)
        )

    def add(self, entry: Entry, line: int, variants: list[Variant]) -> None:
        """Add variants that were found from an entry."""
        last, others = self.latest
        self.latest = entry, [*(others if last is entry else ()), *variants]
        self.starts.add(line)
        self.lines.add(line)
        self.made += variants


def finds(
    tree: Tree, *, logged: bool = False, reading: Callable[[str, int], None] = lambda file, number: None
) -> list[Find]:
    """Return the KL terms of a tree in the order of files and lines.

    A search that is interrupted returns what it has found, and `tree.interrupted` is true then.

    Args:
        tree: the files.
        logged: return those that are only logged as well.
        reading: called with the file of each function that is followed, and its number.
    """
    known: dict[Any, list[Find]] = {}
    try:
        _follow(tree, known, logged, reading)
    except KeyboardInterrupt:
        tree.interrupted = True
    return _settled(tree, known)


def _follow(tree: Tree, known: dict[Any, list[Find]], logged: bool, reading: Callable[[str, int], None]) -> None:
    """Add the terms that are found from the functions of a tree."""
    alone: list[tuple[Entry, list[Variant]]] = []
    for entry in tree.entries():
        reading(str(entry.source.path), tree.numbers[entry.function.scope.file])
        made_there = _looked(tree, entry, known, logged=logged)
        if any(one.place == "helper" for one in made_there):
            alone.append((entry, made_there))
    for entry, before in alone:
        if (told := tree.otherwise(entry)) is not None:
            for one in (one for group in known.values() for one in group):
                one.made = [each for each in one.made if each not in before]
            _looked(tree, told, known, logged=logged)


def _settled(tree: Tree, known: dict[Any, list[Find]]) -> list[Find]:
    """Return what is told of the terms that were found: those of helpers, only where their uses do not say it."""
    for group in known.values():
        for one in group:  # what is only logged is nothing else
            one.made = [each for each in one.made if each.place != "logged"] or one.made
        title = group[0].function.title
        uses = [each for one in group for each in one.made if each.place != "helper"]
        used = any(each.entry == title for each in uses)
        worths = {each.worth for each in uses if each.program}
        for alone in (each for one in group for each in one.made if each.place == "helper"):
            for each in (each for each in uses if each.worth == alone.worth):
                each.learn(alone)  # the helper knows its defaults
        for one in group:
            one.made = [each for each in one.made if each.place != "helper" or each.worth not in worths]
            # What others return of it is told only if nothing else is known; what a loss returns beside itself never.
            one.made = [each for each in one.made if each.place != "helper" or not used]
            one.made = [each for each in one.made if each.place != "helper" or each.entry == title] or one.made
            # What others see it in, whose terms are known, is no term: a metric, or a part of one.
            if not uses and not tree.seen.isdisjoint((one.file, line) for line in one.starts):
                one.made = [each for each in one.made if each.place != "helper" or each.entry != title]
    everything = [one for group in known.values() for one in group if one.made]
    found = [one for one in everything if any(each.place != "helper" for each in one.made) or _is_kl(one)]
    return sorted(found, key=lambda one: (tree.numbers.get(one.file, 0), min(one.lines, default=0)))


def _looked(tree: Tree, entry: Entry, known: dict[Any, list[Find]], *, logged: bool) -> list[Variant]:
    """Add the terms that are found from one function, and return their variants."""
    found: list[Variant] = []
    try:
        for variants in _look(tree, entry, known, logged=logged):
            found += variants
        tree.remember(entry)
        failure = "" if found or not names_kl(entry.function.definition) else entry.failure
    except (*FAILURES, RecursionError) as error:  # one function that is stumbled over ends no scan
        failure = f"it cannot be read: {error}"
    if failure:
        place = entry.source.place(entry.function.definition.lineno)
        tree.lost.append(f"{place} {entry.title}: {failure}"[:200])
    return found


def _look(tree: Tree, entry: Entry, known: dict[Any, list[Find]], *, logged: bool) -> Iterator[list[Variant]]:
    """Add the terms that are found from one function, and yield the variants of each."""
    parts, found, inside = Parts(entry.unfolding), dict[tuple[Node, str], list[Part]](), set[Node]()
    starts = sorted(_ends(entry, parts), key=lambda one: one[1] in REWARDS)
    margins = _margins(entry, [root for root, _ in starts])
    metrics = list(_logged(entry))
    handed_on = reached([root for root, place in starts if place == "helper"])
    seen = [one for one in metrics if handed_on.isdisjoint(nodes_in(one))]
    tree.seen |= _seen(entry, [*(root for root, place in starts if place != "helper"), *seen])
    of_two = [one for one in metrics if isinstance(one, Node) and len(entry.roles.of(one).sides) > 1]
    tree.logged |= {place for one in reached(of_two) for place in entry.graph.written.get(one, ())}
    if logged:
        starts += ((value, "logged") for value in metrics)
    for root, place in starts:
        if place in REWARDS and not inside.isdisjoint(nodes_in(root)):
            continue  # what is called a reward is a factor of a term of the loss
        for part in parts.of(root, place):
            if place == "logged" and (part.place != place or REFERENCE not in entry.roles.of(part.core).sides):
                continue
            if place == "loss" or not _is_preferred(entry, part, margins):
                found.setdefault((part.core, "helper" if place == "helper" else part.place), []).append(part)
                inside |= reached(part.core) if part.place == "loss" else set()
    for (core, place), several in found.items():
        rewards = [one.root for one in found.get((core, "reward"), ())]
        if place == "advantage" and any(one.holds(root) for one in several for root in rewards):
            continue  # what becomes of a reward is known by that
        if place == "loss" and _is_in_another(core, several, found):
            continue
        ends = leaves(entry.roles, core)
        if (where := _place_of(entry, several[-1], tree, ends)) is None:
            continue
        file, _, function = where
        lines = file, function.first, function.last
        # The last is known best, unless nothing can be made of it.
        for part in _uses_first(entry, several[::-1]) if place == "helper" else reversed(several):
            if variants := list(made(entry, part, place, tree.settings, lines)):
                _add(known, entry, part, where, ends, variants)
                yield variants
                break


def _uses_first(entry: Entry, several: list[Part]) -> list[Part]:
    """Return the returned values that a term is in, those first that use it, then those that only report its number.

    A value is reported if it carries no gradient, as `kl.item()`, is itself a part of another value, or is an entry of
    a dictionary that was handed in.
    """
    if len(several) < 2:
        return several
    wholes = [(part.root, reached(part.root)) for part in several]

    def is_reported(part: Part) -> bool:
        own = set(nodes_in(under(part.root, {"same"})))
        still = all(True not in entry.roles.flows(one) for one in own)
        written = any(one.operation == "written" and isinstance(one.arguments[1], str) for one in own)
        return still or written or any(own <= whole and part.root is not root for root, whole in wholes)

    return sorted(several, key=is_reported)


def _is_in_another(core: Node, several: list[Part], found: Mapping[tuple[Node, str], list[Part]]) -> bool:
    """Return True for a term of what is called a loss if the loss that this enters has it as a part of another term."""
    wholes = [parts[-1].root for (other, place), parts in found.items() if place == "loss" and core in reached(other)]
    wholes = [one for one in wholes if all(one is not part.root for part in several)]
    return any(all(reached(one).issuperset(nodes_in(part.root)) for part in several) for one in wholes)


def _seen(entry: Entry, values: list[Any]) -> set[tuple[str, int]]:
    """Return the lines of other functions whose values of two sides are put into losses, rewards and metrics."""
    nodes = (one for one in reached(values) if len(entry.roles.of(one).sides) > 1)
    places = {place for one in nodes for place in entry.graph.written.get(one, ())}
    return {one for one in places if not _is_inside(entry, *one)}


def _logged(entry: Entry) -> Iterator[Any]:
    """Yield what is stored under a name that says KL, or handed on under such a key."""
    for stored in entry.stores:
        if says_kl(stored.name):
            listed = isinstance(stored.value, Node) and stored.value.operation == "appended"
            yield stored.value.arguments[-1] if listed else stored.value
    values = [part for node in entry.graph.nodes for part in node.arguments if isinstance(part, dict)]
    yield from (value for name, value in keyed([*values, entry.returned]) if says_kl(name))


def _is_kl(find: Find) -> bool:
    """Return True for what a function returns if a reference is in it, or its name says KL."""
    return any("ref_" in each.sides or says_kl(find.function.title) for each in find.made)


def _margins(entry: Entry, values: list[Any]) -> set[Node]:
    """Return the probabilities of a preference: those of which a loss takes a sigmoid, and of rewards of its pairs."""
    found: set[Node] = set()
    pairs = [one.value for one in entry.stores if is_preference(one.name) and says(one.name, *REWARD)]
    for node in [*(one for one in reached(values) if one.operation in SIGMOIDS), *nodes_in(pairs)]:
        found |= leaves(entry.roles, node).fields.keys()
    return found


def _is_preferred(entry: Entry, part: Part, margins: set[Node]) -> bool:
    """Return True for the implicit reward of a preference, which is logged and no reward of a policy."""
    fields = [node for node, name in leaves(entry.roles, part.core).fields.items() if "log" in name]
    named = any(is_preference(name) for node in fields for name in (entry.function.name, *entry.roles.names(node)))
    return named or all(node in margins for node in fields)


def _ends(entry: Entry, parts: Parts) -> Iterator[tuple[Any, str]]:
    """Yield the roots of a function without metrics: what is called a loss, and has no gradient.

    It was made without one, in whatever branch, or stands beside a loss that has one.
    """
    found = list(roots(entry))
    carrying = [place == "loss" and any(map(parts.carries, nodes_in(root))) for root, place in found]
    for (root, place), carries in zip(found, carrying, strict=True):
        still = any(carrying) and not carries
        if place != "loss" or not (still or all(map(_is_number, nodes_in(root)))):
            yield root, place


def _is_number(node: Any) -> bool:
    """Return True for what was made without a gradient, in whatever branch."""
    if isinstance(node, Node) and node.operation == CHOICE:
        return all(map(_is_number, node.arguments[1:]))
    return not isinstance(node, Node) or _is_detached(node)


def _is_detached(value: Any) -> bool:
    """Return True for what has lost its gradient, as a number of Python as well."""
    inner = under(value, {"same"})
    return isinstance(inner, Node) and inner.operation == "detach"


def roots(entry: Entry) -> Iterator[tuple[Any, str]]:
    """Yield what a function returns, stores as a loss or reward, and differentiates, with its place."""
    named = list(_returned(entry.returned, entry.graph.names))
    losses = [value for name, value in named if is_loss(name) and not is_logged(name)]
    losses = [one for one in losses if not any(map(_is_detached, branches_of(one)))]
    logs = set(nodes_in([one for _, one in keyed(entry.returned)])) if losses else set()
    # Under its own key: what else it is called says nothing of this use.
    helpers = [(name, value) for name, value in named if not is_logged(name.partition(" ")[0])]
    yield from ((value, "helper") for name, value in helpers if not losses or (says_kl(name) and value not in logs))
    for stored in entry.stores:
        name = stored.name
        # What a function that is called names a loss, as one that averages whatever it is given, may be none here.
        if is_loss(name) and not _is_aside(name) and _is_inside(entry, stored.file, stored.line):
            yield stored.value, "loss"
    yield from _stored_scores(entry)
    title = entry.title if entry.function.name.strip("_") in CALLED else entry.function.name
    if not losses and says(title, *LOSS):
        losses = [value for _, value in named[:1]]
    elif not losses and says(title, *REWARD) and not _is_aside(title):
        yield from ((value, _scored(title)) for _, value in named[:1])
    yield from ((value, "loss") for value in losses)
    for stored in entry.stores:
        if stored.name == BACKWARD_OF:
            yield from ((value, "loss") for value in nodes_in(stored.value))


def _is_aside(name: str) -> bool:
    """Return True for names of what is no loss or reward itself: of logs, of preferences, and of terms."""
    return is_logged(name) or is_preference(name) or says_kl(name)


def _stored_scores(entry: Entry) -> Iterator[tuple[Any, str]]:
    """Yield what is stored as a reward or advantage, each once.

    It is what it is last called in the function that first calls it one: a helper that it is given to may call it
    otherwise.
    """
    scored: dict[int, tuple[Any, str, Any]] = {}
    for stored in entry.stores:
        name = stored.name
        if not says(name, *REWARD) or is_loss(name) or _is_aside(name):
            continue
        where = stored.function and stored.function.definition
        *_, first = scored.get(id(stored.value), (where,))
        if first is where:
            scored[id(stored.value)] = stored.value, _scored(name), where
    yield from ((value, place) for value, place, _ in scored.values())


def _scored(name: str) -> str:
    """Return whether a name says an advantage, which is a token's own, or a reward, which earlier tokens get too."""
    return "advantage" if says(name, "adv") else "reward"


def _returned(value: Any, names: Mapping[Node, Mapping[str, None]], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of what is returned, with what they are called."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _returned(one, names, key if isinstance(key, str) else "")
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _returned(one, names, name)
    elif isinstance(value, Thing):
        for key, one in value.attributes.items():
            yield from _returned(one, names, f"{name} {key}")
    elif isinstance(value, Node) and value.operation == CHOICE and any(map(_is_container, value.arguments[1:])):
        for one in value.arguments[1:]:
            yield from _returned(one, names, name)
    elif isinstance(value, Node):
        yield " ".join([name, *names.get(value, ())]), value


def keyed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of dictionaries in a value."""
    if isinstance(value, dict):
        yield from ((name, one) for name, one in value.items() if isinstance(name, str))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from keyed(one)
    elif isinstance(value, Thing):
        for one in value.attributes.values():
            yield from keyed(one)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | tuple | list | Thing)


def _place_of(entry: Entry, part: Part, tree: Tree, ends: Leaves) -> tuple[str, range, Place] | None:
    """Return where a term stands: its file, the lines of its call or its line, and its function."""
    written = entry.graph.written.get(part.core, set())
    at = written or entry.graph.lines.get(part.core) or _lines(entry, part.core, ends)
    if not at:
        return None
    # What several functions compute of the same is one node: the function that was entered goes before others.
    inside = {one for one in written if _is_inside(entry, *one)}
    file, line = min(inside or at)
    function = next((one for one in tree.places.get(file, ()) if one.first <= line <= one.last), NOWHERE)
    return file, range(line, tree.end_of(file, line) + 1), function


def _is_inside(entry: Entry, file: str, line: int) -> bool:
    """Return True for a line of the function that was entered."""
    own = entry.function.definition
    return file == entry.function.scope.file and own.lineno <= line <= (getattr(own, "end_lineno", 0) or 0)


def _add(
    known: dict[Any, list[Find]],
    entry: Entry,
    part: Part,
    where: tuple[str, range, Place],
    ends: Leaves,
    variants: list[Variant],
) -> None:
    file, rows, function = where
    line = rows.start
    read = {name for name in ends.fields.values() if "log" in name}
    # Branches of one term may be weighted by a ratio to the sampler, or not.
    read = {name for name in read if name.startswith(REFERENCE)} or read
    group = known.setdefault((file, function, frozenset(read)), [])
    find = next((one for one in group if one.takes(entry, line, variants)), None)
    if find is None:
        group.append(find := Find(file, function))
    lines = _lines(entry, part.core, ends, file, function)
    inner = {(name, number) for name, number in lines if name == file and function.first <= number <= function.last}
    find.lines |= {number for _, number in inner} | {number for number in rows if number <= function.last}
    find.others |= lines - inner
    find.depends |= {
        one
        for node in (*part.above, *reached(part.core))
        for each in (entry.graph.lines, entry.graph.written)
        for one in each.get(node, ())
    }
    find.add(entry, line, variants)


def _lines(entry: Entry, core: Node, ends: Leaves, file: str = "", function: Place = NOWHERE) -> set[tuple[str, int]]:
    """Return the lines of a term: of all that is computed between its ends and it.

    What a function computes more than once is one node: of its lines there, the last before its use is the term's.
    """
    found: set[tuple[str, int]] = set()
    stack, seen = [(core, function.last)], set()
    while stack:
        node, use = stack.pop()
        if (node, use) in seen or node in ends.fields or node in ends.unknown:
            continue
        seen.add((node, use))
        lines = entry.graph.written.get(node) or entry.graph.lines.get(node, set())
        own = {number for name, number in lines if name == file and function.first <= number <= function.last}
        before = [number for number in own if number <= use]
        chosen = {max(before)} if before and node is not core else own
        found |= {one for one in lines if one[0] != file or one[1] not in own - chosen}
        parts = [one for one in node.parts if entry.roles.of(one).sides]
        stack.extend((one, each) for one in parts for each in chosen or {use})
    return found
