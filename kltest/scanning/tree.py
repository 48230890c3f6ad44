"""The functions of a source tree, and what was followed in each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kltest.scanning.callees import Callees, Function
from kltest.scanning.flows import NOTHING, Flow, Seed, Value
from kltest.scanning.rewritten import rewrite
from kltest.scanning.sides import Side
from kltest.scanning.sources import Source
from kltest.scanning.twins import name_twins
from kltest.scanning.units import Units


@dataclass(frozen=True)
class Arrival:
    """A flow at its end: `kind` is loss, reward, return, stored or logged; `name` what it is assigned to."""

    flow: Flow
    kind: str
    line: int
    name: str
    detached: bool = False


@dataclass
class Followed:
    """Findings in one function.

    `calls` are the functions of the tree that bring a seed, `shaped` those that make a divergence of a log-ratio;
    `fields` are the sides that calls of models give, by line and column; `whose` is who is behind names that do not say
    it.
    """

    arrivals: list[Arrival] = field(default_factory=list)
    returned: Value = NOTHING
    kl_named: set[Seed] = field(default_factory=set)
    calls: list[tuple[Function, Seed]] = field(default_factory=list)
    shaped: list[tuple[Function, Seed]] = field(default_factory=list)
    fields: dict[tuple[int, int], Side] = field(default_factory=dict)
    whose: dict[str, set[str]] = field(default_factory=dict)


Given = tuple[tuple[str, frozenset[Side]], ...]


class Tree(Callees):
    """All functions of the sources, and what was followed in each."""

    def __init__(self, sources: Sequence[Source], follow: Callable[["Tree", Function, Given], Followed]) -> None:
        for source in sources:
            rewrite(source)
        name_twins(sources)
        super().__init__(sources)
        self._follow = follow
        self.sources = sources
        self.units = Units(self)
        self._followed: dict[tuple[Function, Given], Followed] = {}
        self._open: set[Function] = set()

    def followed(self, function: Function, given: Given = ()) -> Followed:
        """Return what was found in a function, some of whose parameters are given sides that their names do not
        state; nothing while it is being followed itself."""
        if (function, given) not in self._followed:
            if function in self._open:
                return Followed()
            self._open.add(function)
            self._followed[function, given] = self._follow(self, function, given)
            self._open.discard(function)
        return self._followed[function, given]
