"""A rollout as one call of a loss sees it: copies that it may write on, masks and floats of the kind that it wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.rollout import LEAVES, Rollout

_SMALL = 2**16
"""Fields of up to this many numbers are copied for every call; of larger ones, writes are noticed by their version."""
_ABOUT_TYPES = ("dtype", "float", "double", "scalar type")


@dataclass(frozen=True)
class Kind:
    """The types in which a loss is given its mask and its floating-point fields."""

    mask: torch.dtype
    floats: torch.dtype = torch.float64

    def may_mend(self, error: BaseException, *, takes_mask: bool) -> bool:
        """Whether trying this kind makes sense after another one failed so."""
        if self.floats == torch.float32 and not any(word in str(error).lower() for word in _ABOUT_TYPES):
            return False
        return takes_mask or self.mask.is_floating_point

    def __str__(self) -> str:
        mask = f"a mask of {str(self.mask).removeprefix('torch.')}"
        return mask if self.floats == torch.float64 else f"float32 fields and {mask}"


KINDS = (
    Kind(torch.float64),
    Kind(torch.bool),
    Kind(torch.int64),
    Kind(torch.float32, torch.float32),
    Kind(torch.bool, torch.float32),
    Kind(torch.int64, torch.float32),
)


class Handed(Rollout):
    """The view of `base` that one call of a loss gets, at a given β; the leaves are those of `base` themselves."""

    def __init__(self, base: Rollout, beta: float, kind: Kind, *, always_copy: bool) -> None:
        super().__init__({}, beta=beta)
        self._builders = base._builders
        self._base, self._kind, self._always_copy = base, kind, always_copy
        self._given: dict[str, tuple[Tensor, Tensor, int]] = {}

    def peek(self, name: str) -> Any:
        if name in ("beta", "rollout"):
            return self._built[name]
        if name not in self._given:
            original = self._base.peek(name)
            given = self._hand(name, original)
            self._given[name] = (given, original, given._version)
        return self._given[name][0]

    def built(self, name: str) -> Tensor | None:
        return self._base.built(name)

    def written(self) -> set[str]:
        """The fields that were written into since they were handed over."""
        return {name for name, entry in self._given.items() if self._was_written(name, *entry)}

    def shared(self, name: str) -> bool:
        """Whether a write into this field has reached `base`."""
        given, original, _ = self._given[name]
        return given is original

    def _hand(self, name: str, original: Tensor) -> Tensor:
        if name in LEAVES:
            return original.to(self._kind.floats)
        given = original
        if name == "mask":
            given = original.to(self._kind.mask)
        elif original.dtype.is_floating_point:
            given = original.to(self._kind.floats)
        copied = given is original and (self._always_copy or original.numel() <= _SMALL)
        return given.clone() if copied else given

    def _was_written(self, name: str, given: Tensor, original: Tensor, version: int) -> bool:
        if given._version != version:
            return True
        if given is original or given.numel() > _SMALL:
            return False
        expected = original.detach().to(given.dtype)
        return not torch.equal(torch.nan_to_num(given.detach()), torch.nan_to_num(expected))


@contextmanager
def no_integer_mask_as_index(mask: Tensor | None) -> Iterator[None]:
    """Make indexing by an integer mask raise: it would gather rows 0 and 1 where a boolean one selects."""
    if mask is None or mask.dtype != torch.int64:
        yield
        return

    class Guard(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                if any(item is mask for item in index):
                    raise IndexError("the integer mask is used as an index")
            return func(*args, **(kwargs or {}))

    with Guard():
        yield
