"""KL that a loss stores beside what it returns: in a mapping on its object, or in an argument.

A place is a mapping with a "kl", `self.metrics["kl"]` or `self._metrics["train"]["kl"]`; if it holds a list, the last
entry is the newest. Only what a call was seen to write counts as logged by it. A running sum is read by what a call
adds to it; anything else that depends on earlier calls is not read at all.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import numpy as np
from torch import Tensor

from kltest.loss.arguments import Stub, given_to
from kltest.loss.callables import contents
from kltest.loss.global_state import preserved

DEEPEST = 3
# Larger mappings hold data and not other mappings of metrics.
MOST_ENTRIES = 100
Place = tuple[object, ...]


@dataclass(frozen=True)
class Entry:
    """Content of a place at one moment: the newest item itself, a copy of it, and the number of entries of a list.

    `version` counts the writes into a tensor, which may leave the same number.
    """

    item: Any
    copy: Any
    entries: int = -1
    version: int = -1

    @classmethod
    def of(cls, held: Any) -> "Entry":
        entries = len(held) if isinstance(held, MutableSequence | deque) else -1
        item = held if entries < 0 else held[-1] if entries else None
        if isinstance(item, Tensor):
            return cls(item, item.detach().clone(), entries, item._version)
        return cls(item, item.copy() if isinstance(item, np.ndarray) else item, entries)

    def differs(self, other: "Entry | None") -> bool:
        if other is None or (self.entries, self.version) != (other.entries, other.version):
            return True
        return self.item is not other.item or not _equal(self.copy, other.copy)


class StoredMetrics:
    """The places at which a callable, and the objects that it is given, store a KL."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._owners = _owners(function)
        self._way: Literal["assigned", "added", "unreadable"] | None = None

    def look(self, arguments: list[Any]) -> dict[Place, Entry]:
        """Return what every place holds now; `arguments` are the objects that a call was given."""
        owners = enumerate([*self._owners, *arguments])
        return {(number, *place): entry for number, owner in owners for place, entry in _places(owner)}

    def read(
        self, before: Mapping[Place, Entry], arguments: list[Any], again: Callable[[], tuple[Any, list[Any], Any]]
    ) -> tuple[Any, Any, str]:
        """Return the KL that the last call stored, the thing itself, and a sentence if it cannot be read.

        Args:
            before: what the places held before that call.
            arguments: the objects that it was given.
            again: makes the same call once more, its objects in the middle; used once, to learn how the KL is stored.
        """
        after = self.look(arguments)
        place = next((p for p, now in after.items() if now.item is not None and now.differs(before.get(p))), None)
        if place is None:
            return None, None, ""
        was, now = before.get(place), after[place]
        start = was.copy if was else 0.0
        if self._way is None:
            with preserved():
                self._way = _way(start, now, self.look(again()[1]).get(place))
        if self._way == "unreadable":
            text = 'The "kl" that it stores depends on earlier calls and is no running sum: it was not graded.'
            return None, None, text
        return (now.copy - start, None, "") if self._way == "added" else (now.copy, now.item, "")


def holds(owner: Any, item: Any) -> bool:
    """Return True if an object keeps this very thing as its newest KL."""
    return any(entry.item is item for _, entry in _places(owner))


def _owners(function: Callable[..., Any]) -> list[Any]:
    """Return the objects of a callable in which it may keep something from call to call."""
    found: list[Any] = []
    while isinstance(function, partial):
        found += [*function.args, *function.keywords.values()]
        function = function.func
    found += [function, getattr(function, "__self__", None)]
    return [
        thing
        for thing in found
        if isinstance(thing, Mapping) or (hasattr(thing, "__dict__") and not isinstance(thing, ModuleType | type))
    ]


def _places(owner: Any, depth: int = DEEPEST) -> Iterator[tuple[Place, Entry]]:
    """Yield every mapping with a "kl" in or under an object, with the keys that lead to it."""
    try:
        held = given_to(owner) if isinstance(owner, Stub) else owner
        entries = dict(contents(held))
    except Exception:  # a mapping of the user's own that cannot be listed has no metrics for anyone to read
        return
    if len(entries) > MOST_ENTRIES:
        return
    # An attribute `kl` of an object may be anything, a setting or a function.
    if "kl" in entries and (isinstance(owner, Mapping) or depth < DEEPEST):
        yield ("kl",), Entry.of(entries["kl"])
    for key, inner in entries.items():
        if depth and isinstance(inner, Mapping | Stub):
            yield from (((key, *place), entry) for place, entry in _places(inner, depth - 1))


def _way(start: Any, second: Entry, third: Entry | None) -> Literal["assigned", "added", "unreadable"]:
    """Return how a place is written, from its content before, after one call and after the same call once more."""
    if third is None:
        return "unreadable"
    if _equal(second.copy, third.copy):
        return "assigned"
    try:
        steps = np.asarray(second.copy - start), np.asarray(third.copy - second.copy)
        adds = second.entries == -1 and np.allclose(*steps, rtol=1e-6, atol=1e-12)
    except (TypeError, ValueError, RuntimeError):
        adds = False
    return "added" if adds else "unreadable"


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)
    except (TypeError, ValueError, RuntimeError):
        return False
