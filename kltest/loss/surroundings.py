"""Surroundings of a call that a loss may ask for: precision, device, autocast, compiler, environment variables, clock.

Each is pretended: the loss is told of another one, and computes in float64 on the CPU all the same. So what differs is
another formula, behind a branch that asks for it, and no rounding.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from kltest.loss.precision import DIGITS
from kltest.loss.state import functions_of

CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
CLOCKS = ("time", "monotonic", "perf_counter")
CLOCKS_OF_NANOSECONDS = ("time_ns", "monotonic_ns", "perf_counter_ns")
_AUTOCAST = ("is_autocast_enabled", "is_autocast_cpu_enabled")
_COMPILING = ("is_compiling", "is_dynamo_compiling")
# What reads a property of a tensor, by the name of the property.
_PROPERTIES = {name: getattr(Tensor, name).__get__ for name in ("dtype", "itemsize", "device", "is_cuda")}


class Pretended(TorchFunctionMode):
    """While active, float64 tensors of the CPU say that they are of another type, or of a GPU; they stay what they are.

    A type that code itself asks for, as `x.float()` does, is what the result says, until it is computed with.
    """

    def __init__(self, kind: torch.dtype | None = None, device: str = "") -> None:
        super().__init__()
        self.kind, self.device = kind, torch.device(device) if device else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (said := self._said(func, args)) is not None:
            return said
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "cuda":
            return args[0].view_as(args[0])
        asked = [one for one in (*args, *kwargs.values(), CASTS.get(name)) if one in DIGITS] if self.kind else []
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
        if self.device and func == _PROPERTIES["device"]:
            return self.device
        return True if self.device and func == _PROPERTIES["is_cuda"] else None

    def _real(self, given: Any) -> Any:
        """Return arguments with the types and devices that stay."""
        if self.kind:
            given = tree_map_only(torch.dtype, lambda kind: torch.float64 if kind in DIGITS else kind, given)
        if self.device:
            given = tree_map_only(torch.device, lambda one: torch.device("cpu") if one.type == "cuda" else one, given)
            given = tree_map_only(str, lambda one: "cpu" if one.startswith("cuda") else one, given)
        return given


@contextmanager
def under_autocast() -> Iterator[None]:
    """Pretend that autocast is on: nothing is cast."""
    with _set(torch, {name: lambda *_: True for name in _AUTOCAST}):
        yield


def slices(given: Any) -> Any:
    """Return arguments with the same numbers, in tensors whose rows are each followed by a column of the memory."""
    return tree_map_only(Tensor, lambda one: torch.cat([one, one[:, :1]], 1)[:, :-1] if one.dim() > 1 else one, given)


@contextmanager
def compiling(function: Any) -> Iterator[None]:
    """Pretend that torch compiles a loss, also where it or a helper has imported the question: nothing is compiled."""
    asked = {getattr(torch.compiler, name): lambda: True for name in _COMPILING if hasattr(torch.compiler, name)}
    with exchanged(asked, vars(torch.compiler), function):
        yield


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
    """Move all clocks ahead, also where a function or a helper of it has imported one by its name."""
    moved: dict[Any, Callable[[], Any]] = {}
    for names, unit in ((CLOCKS, 1), (CLOCKS_OF_NANOSECONDS, 10**9)):
        for name in names:
            moved[getattr(time, name)] = _ahead(getattr(time, name), type(unit)(seconds * unit))
    with exchanged(moved, vars(time), function):
        yield


def _ahead(clock: Callable[[], Any], by: float) -> Callable[[], Any]:
    return lambda: clock() + by


@contextmanager
def exchanged(functions: Mapping[Any, Any], module: dict[str, Any], loss: Any) -> Iterator[None]:
    """Put other functions in the place of those of a module, and of what a loss and its helpers have imported of it."""
    spaces = {id(space): space for space in (module, *(one.__globals__ for one in functions_of(loss)))}
    before: list[tuple[dict[str, Any], str, Any]] = []
    for space in spaces.values():
        for name, value in list(space.items()):
            if isinstance(value, BuiltinFunctionType | FunctionType | MethodType) and value in functions:
                before.append((space, name, value))
                space[name] = functions[value]
    try:
        yield
    finally:
        for space, name, value in before:
            space[name] = value
