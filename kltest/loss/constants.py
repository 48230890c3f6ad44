"""Numbers in the code of a loss and in what it reads by name: which it compares with sizes, and others in their place.

A number is watched as one that knows what it is compared with: a size in Python that it parts or bounds, counts in a
tensor, the size of what is sliced or split at it. All else that is done with it, as sums and products, tells nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import isfinite
from types import CodeType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.loss.reach import all_names
from kltest.loss.state import functions_of, places_of

COMPARED = frozenset({"lt", "le", "gt", "ge", "less", "greater", "less_equal", "greater_equal"})
BOUNDED = frozenset({"clamp", "clamp_min", "clamp_max", "clip"})
Sizes = dict[float, list[int]]


class _Watched:
    """A number that writes down what it is compared with; `origin` is the number of the code that it came from."""

    origin: float
    seen: Sizes

    def saw(self, other: Any) -> None:
        """Write down a size, which is a whole number."""
        if type(other) in (int, float) and other and other == other // 1:
            self.seen.setdefault(self.origin, []).append(int(other))


def _noted(kind: type, name: str) -> Callable[[Any, Any], Any]:
    """Return a method of a watched number that does what the plain one's does; of sums the result is watched too."""
    plain = getattr(kind, name)

    def method(self: Any, other: Any) -> Any:
        if name not in ("__add__", "__radd__"):
            self.saw(other)
            return plain(self, other)
        result = plain(self, other)
        return result if result is NotImplemented else _watched(result, self.seen, self.origin)

    return method


_NOTED = ("__lt__", "__le__", "__gt__", "__ge__", "__rfloordiv__", "__rmod__", "__rdivmod__", "__add__", "__radd__")
_KINDS: dict[type, type] = {
    kind: type(kind.__name__, (_Watched, kind), {name: _noted(kind, name) for name in _NOTED}) for kind in (int, float)
}


def _watched(value: Any, seen: Sizes, origin: float) -> Any:
    number = _KINDS[type(value)](value) if type(value) in _KINDS else value
    if isinstance(number, _Watched):
        number.origin, number.seen = origin, seen
    return number


def numbers_above(function: Any, least: float) -> set[float]:
    """Return the numbers of the code of a function and its helpers, and of what they read by name, above one."""
    found: set[float] = {value for _, value in _named(function)}

    def keep(value: float) -> float:
        found.add(value)
        return value

    for one in functions_of(function):
        _with_constants(one.__code__, keep)
    return {value for value in found if isfinite(value) and abs(value) > least}


def names_in(function: Any) -> set[str]:
    """Return the names of attributes, and the short texts, in the code of a function and its helpers."""
    codes = [one.__code__ for one in functions_of(function)]
    return set().union(*map(all_names, codes), *(filter(_is_text, code.co_consts) for code in codes))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


@contextmanager
def exchanged_numbers(function: Any, others: Mapping[float, Any]) -> Iterator[None]:
    """Let a function and its helpers run with other numbers in the place of some."""

    def other(value: Any) -> Any:
        return others.get(value, value)

    with ExitStack() as stack:
        for one in functions_of(function):
            code = _with_constants(one.__code__, other)
            if code is not one.__code__:
                stack.callback(setattr, one, "__code__", one.__code__)
                one.__code__ = code
        for place, value in _named(function):
            if value in others:
                stack.callback(place.put, value)
                place.put(others[value])
        yield


@contextmanager
def watched_numbers(function: Any, numbers: Iterable[float], seen: Sizes, ids: bool) -> Iterator[None]:
    """Write into `seen` the sizes with which a function compares numbers.

    Args:
        function: The function.
        numbers: The numbers that are watched.
        seen: The sizes, by the number.
        ids: True if tensors of whole numbers may hold ids of tokens: then they hold no sizes.
    """
    with exchanged_numbers(function, {value: _watched(value, seen, value) for value in numbers}), _Sizes(ids):
        yield


class _Sizes(TorchFunctionMode):
    """Mode in which functions of torch tell watched numbers what they are compared with."""

    def __init__(self, ids: bool) -> None:
        super().__init__()
        self.ids = ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if args and isinstance(args[0], Tensor):
            tensor, given = args[0], [one for one in (*args[1:], *kwargs.values()) if isinstance(one, _Watched)]
            if name in COMPARED | BOUNDED and given and self._counts(tensor):
                for one in given:
                    one.saw(int(tensor.detach().abs().max()))
            elif name == "getitem":
                _sliced(tensor, args[1] if isinstance(args[1], tuple) else (args[1],))
            elif name in ("split", "narrow") and given:
                place = 2 if name == "split" else 1
                dimension = kwargs.get("dim", args[place] if len(args) > place else 0)
                for one in given:
                    one.saw(tensor.shape[dimension])
        return func(*args, **kwargs)

    def _counts(self, tensor: Tensor) -> bool:
        """Return True if a tensor holds whole numbers that are no ids of tokens."""
        if not tensor.is_floating_point():
            return not self.ids and tensor.numel() > 0
        return tensor.numel() > 0 and bool((tensor.detach() == tensor.detach().round()).all())


def _sliced(tensor: Tensor, index: tuple[Any, ...]) -> None:
    before = next((place for place, one in enumerate(index) if one is Ellipsis), len(index))
    for place, one in enumerate(index):
        if isinstance(one, slice):
            dimension = place if place < before else place - len(index)
            for bound in (one.start, one.stop):
                if isinstance(bound, _Watched):
                    bound.saw(tensor.shape[dimension])


def _named(function: Any) -> Iterator[tuple[Any, float]]:
    """Yield the places that hold a number: names of the module, variables of a closure, attributes of classes."""
    for place in places_of(function, {}):
        if not place.drawn and type(value := place.get()) in _KINDS:
            yield place, value


def _with_constants(code: CodeType, other: Callable[[Any], Any]) -> CodeType:
    """Return code, and that of the functions inside it, with other numbers; itself if there are none."""
    constants = tuple(
        _with_constants(one, other) if isinstance(one, CodeType) else other(one) if type(one) in _KINDS else one
        for one in code.co_consts
    )
    same = all(one is before for one, before in zip(constants, code.co_consts, strict=True))
    return code if same else code.replace(co_consts=constants)
