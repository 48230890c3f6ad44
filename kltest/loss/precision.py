"""The floating-point precision in which a loss computed, whatever the type of what it returned."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

DIGITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Bits of the mantissa of each floating-point type."""


def least_precise(types: Iterable[torch.dtype]) -> torch.dtype:
    """Return the least precise of some types, float64 if there is none."""
    return min(types, key=_digits, default=torch.float64)


class PrecisionTrace(TorchFunctionMode):
    """While active, follows rounding: which tensors went through a type narrower than float64 that cost them digits.

    A step counts if it is not exact: a mask of zeros and ones, or a count, loses nothing in float32. Tensors are known
    by their storage, so that views and writes through views are followed. (A function mode and no dispatch mode: the
    latter would import the whole of torch's compiler, which takes longer than grading does.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._narrowest: dict[int, torch.dtype] = {}
        self._alive: list[Any] = []

    def of(self, tensor: Tensor) -> torch.dtype:
        """Return the narrowest type that cost this tensor digits, float64 if none did."""
        return self._narrowest.get(_memory(tensor)._cdata, torch.float64)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [item for item in tree_iter((args, kwargs), is_leaf=is_numbers) if isinstance(item, Tensor)]
        seen = least_precise(map(self.of, inputs))
        outputs = func(*args, **kwargs)
        for output in tree_iter((outputs, args[:1] if _writes(func) else ())):
            if isinstance(output, Tensor) and output.dtype in DIGITS:
                narrow = _digits(output.dtype) < 52 and _rounded(func, args, kwargs, output)
                found = least_precise((seen, output.dtype) if narrow else (seen,))
                if _digits(found) < _digits(self.of(output)):
                    self._alive.append(_memory(output))
                    self._narrowest[self._alive[-1]._cdata] = found
        return outputs


def is_numbers(item: Any) -> bool:
    """Return True for a shape, which stays one, and for a list of numbers: a million are not looked at one by one."""
    return isinstance(item, torch.Size) or (type(item) is list and set(map(type, item)) <= {bool, int, float})


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; inside torch.func.grad or torch.vmap, that of the tensor wrapped there."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _rounded(func: Any, args: tuple, kwargs: dict[str, Any], output: Tensor) -> bool:
    """Return True if an operation lost digits, by doing it again in float64."""
    if output.is_meta:  # of a nested tensor's shape: it has no numbers
        return False
    if _writes(func):
        return any(isinstance(item, Tensor) and item.is_floating_point() for item in args[1:])
    args, kwargs = tree_map_only((Tensor, torch.dtype), _widened, (args, kwargs), is_leaf=is_numbers)
    try:
        again = func(*args, **kwargs)
    except (RuntimeError, TypeError):
        return True
    if not isinstance(again, Tensor) or again.shape != output.shape:
        return True
    if again.dtype in DIGITS and again.dtype != torch.float64 and args and isinstance(args[0], Tensor):
        again = args[0]  # a cast that its name alone makes, as `half`
    return not torch.equal(_numbers(again), _numbers(output))


def _numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in float64, those of its rows in one if it is a nested one, with zeros for NaN."""
    return torch.nan_to_num((tensor.values() if tensor.layout == torch.jagged else tensor).double())


def _writes(func: Any) -> bool:
    """Return True if a function of torch writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or bool(re.fullmatch(r"__i\w+__|\w*[a-z0-9]_", name))


def _widened(item: Tensor | torch.dtype) -> Tensor | torch.dtype:
    if isinstance(item, torch.dtype):
        return torch.float64 if item in DIGITS else item
    return item.double() if item.dtype in DIGITS else item


def _digits(kind: torch.dtype) -> int:
    return DIGITS.get(kind, 0)
