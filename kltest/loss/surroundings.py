"""Surroundings of a call that a loss may ask for: precision, device, autocast, compiler, environment variables, clock.

Each is pretended: the loss is told of another one, and computes in float64 on the CPU all the same. So what differs is
another formula, behind a branch that asks for it, and no rounding.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from itertools import count, product
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from kltest.loss.precision import DIGITS, is_numbers
from kltest.loss.state import functions_of, places_of

CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
CLOCKS = ("time", "monotonic", "perf_counter")
CLOCKS_OF_NANOSECONDS = ("time_ns", "monotonic_ns", "perf_counter_ns")
_AUTOCAST = ("is_autocast_enabled", "is_autocast_cpu_enabled")
_CAST_ON = ("cpu", "cuda")
_COMPILING = ("is_compiling", "is_dynamo_compiling")
# What reads a property of a tensor, by the name of the property.
_PROPERTIES = {name: getattr(Tensor, name).__get__ for name in ("dtype", "itemsize", "device", "is_cpu")}
_OF_DEVICES = {getattr(Tensor, f"is_{kind}").__get__: kind for kind in ("cuda", "mps", "xpu")}
# Functions of torch.cuda and the like, and what they say where there is such a device.
_AVAILABLE = {
    **dict.fromkeys(("is_available", "is_built", "is_bf16_supported"), True),
    **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), 0),
    "device_count": 1,
}
_FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, type(lru_cache(len)))


class Pretended(TorchFunctionMode):
    """While active, float64 tensors of the CPU say that they are of another type or device; they stay what they are.

    A type that code itself asks for, as `x.float()` does, is what the result says, until it is computed with.
    """

    def __init__(self, kind: torch.dtype | None = None, device: str = "") -> None:
        super().__init__()
        self.kind, self.device = kind, torch.device(device) if device else None
        self._of_device: dict[Any, Any] = {}
        if self.device:
            self._of_device = {_PROPERTIES["device"]: self.device, _PROPERTIES["is_cpu"]: False}
            self._of_device |= {function: of == self.device.type for function, of in _OF_DEVICES.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (said := self._said(func, args)) is not None:
            return said
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "cuda":
            return args[0].view_as(args[0])
        given = (*args, *kwargs.values(), CASTS.get(name)) if self.kind else ()
        asked = [one for one in given if isinstance(one, torch.dtype) and one in DIGITS]
        if self.kind and name in CASTS:
            result = args[0].double()
        else:
            result = func(*self._real(args), **self._real(kwargs))
        if asked and isinstance(result, Tensor) and result.dtype == torch.float64:
            result = result.view_as(result)
            result.said = asked[0]  # type: ignore[attr-defined]
        return result

    def _said(self, func: Any, args: Any) -> Any:
        """Return what a property of a tensor is said to be, None for all other functions."""
        name = getattr(func, "__name__", "")
        if self.kind and name in ("__get__", "element_size") and args and isinstance(args[0], Tensor):
            kind = getattr(args[0], "said", self.kind) if args[0].dtype == torch.float64 else None
            if kind and func == _PROPERTIES["dtype"]:
                return kind
            if kind and (func == _PROPERTIES["itemsize"] or name == "element_size"):
                return kind.itemsize
        if name == "type" and len(args) == 1:
            said, on = getattr(args[0], "said", self.kind), f".{self.device.type}" if self.device else ""
            narrow = args[0].to(said) if said and args[0].dtype == torch.float64 else args[0]
            return f"torch{on}.{narrow.type().rpartition('.')[2]}"
        return 0 if self.device and name == "get_device" else self._of_device.get(func)

    def _real(self, given: Any) -> Any:
        """Return arguments with the types and devices that stay."""
        if self.kind:
            given = tree_map_only(
                torch.dtype, lambda kind: torch.float64 if kind in DIGITS else kind, given, is_numbers
            )
        if self.device:
            kind, cpu = self.device.type, torch.device("cpu")
            given = tree_map_only(torch.device, lambda one: cpu if one.type == kind else one, given, is_numbers)
            given = tree_map_only(str, lambda one: "cpu" if one.partition(":")[0] == kind else one, given, is_numbers)
        return given


@contextmanager
def on_device(kind: str, function: Any) -> Iterator[None]:
    """Pretend that tensors are on a device, and that torch has one of this kind: cuda, mps, xpu."""
    modules = [getattr(owner, name, None) for owner, name in ((torch, kind), (torch.backends, kind))]
    modules = [one for one in (*modules, getattr(torch, "accelerator", None)) if one is not None]
    said = {**_AVAILABLE, "current_accelerator": torch.device(kind)}
    asked = {
        getattr(module, name): partial(_answer, value)
        for module, (name, value) in product(modules, said.items())
        if hasattr(module, name)
    }
    with Pretended(device=kind), exchanged(asked, [vars(module) for module in modules], function):
        yield


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


@contextmanager
def under_autocast() -> Iterator[None]:
    """Pretend that autocast is on: nothing is cast, and the flags of torch are as before.

    torch asks too, to restore what it finds when a context of the loss's own ends, and is told the truth.
    """
    asked = {name: getattr(torch, name) for name in _AUTOCAST}
    before = {kind: torch.is_autocast_enabled(kind) for kind in _CAST_ON}

    def said(truth: Callable[..., bool], *of: Any) -> bool:
        of_torch = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return truth(*of) if of_torch else True

    try:
        with _set(torch, {name: partial(said, truth) for name, truth in asked.items()}):
            yield
    finally:
        for kind, enabled in before.items():
            torch.set_autocast_enabled(kind, enabled)


def slices(given: Any) -> Any:
    """Return arguments with the same numbers, in tensors whose rows are each followed by a column of the memory."""
    return tree_map_only(Tensor, lambda one: torch.cat([one, one[:, :1]], 1)[:, :-1] if one.dim() > 1 else one, given)


@contextmanager
def compiling(function: Any) -> Iterator[None]:
    """Pretend that torch compiles a loss, also where it or a helper has imported the question: nothing is compiled."""
    asked = {getattr(torch.compiler, name): lambda: True for name in _COMPILING if hasattr(torch.compiler, name)}
    with exchanged(asked, [vars(torch.compiler)], function):
        yield


def other_switches(function: Any) -> list[tuple[str, Callable[[], AbstractContextManager[None]]]]:
    """Return what of its module a function reads that is True or False, by name, and what turns each round."""
    places = [place for place in places_of(function, {}) if place.name.endswith("its module")]
    return [
        (f"{place.name} = {not place.get()}", partial(_turned, place)) for place in places if type(place.get()) is bool
    ]


@contextmanager
def _turned(place: Any) -> Iterator[None]:
    before = place.get()
    place.put(not before)
    try:
        yield
    finally:
        place.put(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch be asked for deterministic algorithms, as for runs that repeat; those that have none are no error."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch.use_deterministic_algorithms loads a compiler first, which takes seconds.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before, warn_only=warned)


@contextmanager
def _set(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def variables_read(names: set[str]) -> Iterator[None]:
    """Add the names of the environment variables that are read to a set."""
    kind = type(os.environ)
    read = kind.__getitem__

    def recorded(own: Any, key: Any) -> Any:
        names.add(str(key))
        return read(own, key)

    with _set(kind, {"__getitem__": recorded}):
        yield


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def later(seconds: float, function: Any) -> Iterator[None]:
    """Move all clocks ahead, also where a function or a helper of it has imported one by its name.

    And by as much again whenever one is read, as if that took so long.
    """
    moved: dict[Any, Callable[[], Any]] = {}
    for names, unit in ((CLOCKS, 1), (CLOCKS_OF_NANOSECONDS, 10**9)):
        for name in names:
            moved[getattr(time, name)] = _ahead(getattr(time, name), type(unit)(seconds * unit))
    with exchanged(moved, [vars(time)], function):
        yield


def _ahead(clock: Callable[[], Any], by: float) -> Callable[[], Any]:
    times = count(1)
    return lambda: clock() + next(times) * by


@contextmanager
def exchanged(functions: Mapping[Any, Any], modules: Sequence[dict[str, Any]], loss: Any) -> Iterator[None]:
    """Put other functions in the place of those of modules, and of what a loss and its helpers import of them."""
    spaces = {id(space): space for space in (*modules, *(one.__globals__ for one in functions_of(loss)))}
    before: list[tuple[dict[str, Any], str, Any]] = []
    for space in spaces.values():
        for name, value in list(space.items()):
            if isinstance(value, _FUNCTIONS) and value in functions:
                before.append((space, name, value))
                space[name] = functions[value]
    try:
        yield
    finally:
        for space, name, value in before:
            space[name] = value
