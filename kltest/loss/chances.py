"""Random numbers that a loss compares with something: on which side they fell, and what happens on the other side.

A branch behind `random.random() < 1e-4` hardly ever runs. Each comparison is a site: a place in the code. What came out
there is recorded, and it can be made to come out the other way.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from kltest.loss.precision import is_numbers
from kltest.loss.surroundings import exchanged

_DRAWN = ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "multinomial")
_FILLED = ("uniform_", "normal_", "random_", "exponential_")
_TOSSED = ("bernoulli", "bernoulli_")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_READ = ("item", "tolist")
_OF_PYTHON = ("random", "uniform", "gauss", "normalvariate", "randint", "randrange", "expovariate", "betavariate")
_OF_NUMPY = ("random", "random_sample", "rand", "randn", "randint", "uniform", "normal", "binomial")
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "mod", "neg", "abs")

Site = tuple[Any, int]


class Chances:
    """What came out at each site; at that which is `turned`, the opposite comes out."""

    def __init__(self) -> None:
        self.seen: dict[Site, set[bool]] = {}
        self.turned: Site | None = None

    @property
    def one_sided(self) -> list[Site]:
        """The sites at which only one of two things came out so far."""
        return [site for site, outcomes in self.seen.items() if len(outcomes) == 1]

    @contextmanager
    def watched(self, loss: Any) -> Iterator[None]:
        """Watch the random numbers that a function and its helpers draw, from torch, Python and NumPy."""
        with ExitStack() as stack:
            for module, names in ((random, _OF_PYTHON), (np.random, _OF_NUMPY)):
                drawn = {getattr(module, name): self._watching(getattr(module, name)) for name in names}
                stack.enter_context(exchanged(drawn, [vars(module)], loss))
            stack.enter_context(_OfTensors(self))
            yield

    def _watching(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.number(draw(*args, **kwargs))

    def number(self, value: Any) -> Any:
        """Return a number that was drawn as one that is watched; anything else as it is."""
        if isinstance(value, list):
            return [self.number(each) for each in value]
        kind = _Whole if type(value) is int else _Real if isinstance(value, float) else None
        if kind is None:
            return value
        watched = kind(value)
        watched.chances = self
        return watched

    def outcome(self, site: Site, came_out: Any) -> Any:
        """Record what came out at a site, True or False or a tensor of these, and return it, or the opposite."""
        here = self.seen.setdefault(site, set())
        if isinstance(came_out, Tensor):
            here |= {bool(part) for part in (came_out.any(), came_out.all())} if came_out.numel() else set()
            turned: Any = (~came_out) if came_out.dtype == torch.bool else 1 - came_out
        else:
            here.add(bool(came_out))
            turned = not came_out
        return turned if site == self.turned else came_out


class _Watched:
    """A number that was drawn, or that was computed of one and of constants."""

    chances: Chances


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    def compare(own: Any, other: Any) -> Any:
        plain = getattr(type(own).__mro__[2], name)(own, other)
        return plain if plain is NotImplemented else own.chances.outcome(_site(sys._getframe(1)), plain)

    return compare


def _operation(name: str) -> Callable[..., Any]:
    def compute(own: Any, *other: Any) -> Any:
        plain = getattr(type(own).__mro__[2], name)(own, *other)
        return own.chances.number(plain)

    return compute


_METHODS: dict[str, Any] = {
    **{name: _comparison(name) for name in _COMPARED if name.startswith("_")},
    **{f"__{name}__": _operation(f"__{name}__") for name in _ARITHMETIC},
    "__hash__": lambda own: (int if isinstance(own, int) else float).__hash__(own),
}
_Real = type("_Real", (_Watched, float), _METHODS)
_Whole = type("_Whole", (_Watched, int), _METHODS)


class _OfTensors(TorchFunctionMode):
    """While active, watches tensors that torch has drawn, and what is computed of them and of constants alone."""

    def __init__(self, chances: Chances) -> None:
        super().__init__()
        self.chances = chances

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in _TOSSED:
            result = self.chances.outcome(_site(sys._getframe(1)), result)
            result.watched = True  # type: ignore[attr-defined]
            return result
        if name in _DRAWN or name in _FILLED:
            result.watched = True  # type: ignore[attr-defined]
            return result
        tensors = [one for one in tree_iter((args, kwargs), is_numbers) if isinstance(one, Tensor)]
        if not tensors or not any(getattr(one, "watched", False) for one in tensors):
            return result
        if name in _COMPARED and isinstance(result, Tensor):
            return self.chances.outcome(_site(sys._getframe(1)), result)
        if all(getattr(one, "watched", False) for one in tensors):
            if name in _READ:
                return self.chances.number(result)
            if isinstance(result, Tensor):
                result.watched = True  # type: ignore[attr-defined]
        return result


def _site(frame: Any) -> Site:
    return frame.f_code, frame.f_lasti
