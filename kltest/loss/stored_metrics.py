"""The KL that a loss stores beside what it returns: in a mapping on its object, in an argument, in its closure.

A place is a mapping with a "kl", `self.metrics["kl"]` or `self._metrics["train"]["kl"]`; where it holds a list, the
last entry is the newest. Only what a call was seen to write counts as logged by it. A running sum is read by what a
call adds to it; anything else that depends on earlier calls is not read at all.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kltest.loss.arguments import Stub

DEEPEST = 3
# Larger mappings hold data and not other mappings of metrics.
MOST_ENTRIES = 100
Place = tuple[object, ...]


@dataclass(frozen=True)
class Entry:
    """What a place held at one moment: the newest item itself, a copy of it, and how many entries a list had.

    `version` counts the writes into a tensor, which may leave the same number.
    """

    item: Any
    copy: Any
    entries: int = -1
    version: int = -1

    def differs(self, other: Entry) -> bool:
        counted = (self.entries, self.version) != (other.entries, other.version)
        return counted or self.item is not other.item or not _equal(self.copy, other.copy)


@dataclass(frozen=True)
class StoredValue:
    """What one call left at a place; `item` is the newest thing itself, None where only `number` can be told."""

    number: Any
    item: Any = None


class StoredMetrics:
    """The places at which a callable, and the objects that it is given, keep a KL."""

    def __init__(self, function: Callable[..., Any], given: list[Any]) -> None:
        self._objects = [*_owners(function), *given]
        self._fixed = len(self._objects) - len(given)
        self._way: Literal["assigned", "added", "unreadable"] | None = None

    def look(self, given: list[Any] | None = None) -> dict[Place, Entry]:
        """What every place holds now; `given` are the objects of the present call instead of those at the start."""
        objects = self._objects if given is None else [*self._objects[: self._fixed], *given]
        return {(number, *place): kept for number, owner in enumerate(objects) for place, kept in _places(owner)}

    def read(
        self, before: Mapping[Place, Entry], given: list[Any], again: Callable[[], list[Any]]
    ) -> tuple[StoredValue | None, str]:
        """What the call that was just made wrote, and a sentence where that cannot be told.

        `again` makes the same call once more and returns what it was given: done once, to learn how it is kept.
        """
        after = self.look(given)
        place = next((p for p, now in after.items() if now.item is not None and _changed(before.get(p), now)), None)
        if place is None:
            return None, ""
        if self._way is None:
            random = torch.get_rng_state()
            third = self.look(again()).get(place)
            torch.set_rng_state(random)
            self._way = _way(before.get(place), after[place], third)
        if self._way == "unreadable":
            return None, 'The "kl" that it stores depends on earlier calls and is no running sum: it was not graded.'
        if self._way == "added":
            was = before.get(place)
            return StoredValue(after[place].copy - (was.copy if was else 0.0)), ""
        return StoredValue(after[place].copy, after[place].item), ""


def _owners(function: Callable[..., Any]) -> list[Any]:
    """The objects in which a callable may keep something from call to call: its own, and those that it names."""
    found: list[Any] = []
    while isinstance(function, partial):
        found += [*function.args, *function.keywords.values()]
        function = function.func
    found += [function, getattr(function, "__self__", None)]
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(plain):
        with suppress(ValueError):  # a variable of the closure that has no value yet
            named = inspect.getclosurevars(plain)
            found += [*named.nonlocals.values(), *named.globals.values()]
    return [thing for thing in found if isinstance(thing, Mapping | Stub) or _may_keep(thing)]


def _may_keep(thing: Any) -> bool:
    return hasattr(thing, "__dict__") and not (inspect.ismodule(thing) or isinstance(thing, type))


def _entries(thing: Any) -> Mapping[Any, Any]:
    if isinstance(thing, Stub):
        return dict(vars(thing)["_stub_given"])
    if isinstance(thing, Mapping):
        return thing
    return getattr(thing, "__dict__", {})


def holds(owner: Any, item: Any) -> bool:
    """Whether an object keeps this very thing as its newest KL."""
    return any(kept.item is item for _, kept in _places(owner))


def _places(owner: Any, depth: int = DEEPEST) -> Iterator[tuple[Place, Entry]]:
    """Every mapping with a "kl" in or under an object, by the keys that lead to it."""
    try:
        entries = dict(_entries(owner)) if len(_entries(owner)) <= MOST_ENTRIES else {}
    except Exception:  # a mapping of the user's own that cannot be listed has no metrics for anyone to read
        return
    # An attribute `kl` of an object may be anything, a setting or a function.
    if "kl" in entries and (isinstance(owner, Mapping) or depth < DEEPEST):
        yield ("kl",), _kept(entries["kl"])
    for key, inner in entries.items():
        if depth and isinstance(inner, Mapping | Stub):
            yield from (((key, *place), kept) for place, kept in _places(inner, depth - 1))


def _kept(held: Any) -> Entry:
    entries = len(held) if isinstance(held, MutableSequence | deque) else -1
    item = held if entries < 0 else held[-1] if entries else None
    return Entry(item, _copy(item), entries, item._version if isinstance(item, Tensor) else -1)


def _copy(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.detach().clone()
    return item.copy() if isinstance(item, np.ndarray) else item


def _changed(was: Entry | None, now: Entry) -> bool:
    return was is None or was.differs(now)


def _way(first: Entry | None, second: Entry, third: Entry | None) -> Literal["assigned", "added", "unreadable"]:
    """How a place is written, from what it held before, after one call and after the same call once more."""
    if third is None:
        return "unreadable"
    if _equal(second.copy, third.copy):
        return "assigned"
    try:
        step = second.copy - (first.copy if first is not None else 0.0)
        total = third.copy - second.copy
        adds = second.entries == -1 and np.allclose(np.asarray(step), np.asarray(total), rtol=1e-6, atol=1e-12)
    except (TypeError, ValueError, RuntimeError):
        adds = False
    return "added" if adds else "unreadable"


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)
    except (TypeError, ValueError, RuntimeError):
        return False
