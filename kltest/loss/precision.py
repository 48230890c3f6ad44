"""The floating-point precision in which a loss computed, whatever the type of what it returned."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def lowest_precision(results: Iterable[Tensor], traced: Iterable[torch.dtype] = ()) -> str:
    """Return the least precise floating type that went into some tensors: the name of a type, without "torch.".

    Autograd's record of what they were computed from tells of every differentiable step; `traced` (from a
    PrecisionTrace) of the others, such as a detached weight in float32.
    """
    found = set(traced).union(*(_in_graph(result) for result in results))
    return str(min(found, key=_bits)).removeprefix("torch.")


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
        inputs = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        seen = min((self.of(item) for item in inputs), key=_bits, default=torch.float64)
        outputs = func(*args, **kwargs)
        for output in tree_iter((outputs, args[:1] if _writes(func) else ())):
            if isinstance(output, Tensor) and output.dtype in _BITS:
                narrow = _bits(output.dtype) < 52 and _rounded(func, args, kwargs, output)
                found = min((seen, output.dtype if narrow else torch.float64), key=_bits)
                if _bits(found) < _bits(self.of(output)):
                    self._alive.append(_memory(output))
                    self._narrowest[self._alive[-1]._cdata] = found
        return outputs


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; inside torch.func.grad or torch.vmap, that of the tensor wrapped there."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _in_graph(result: Tensor) -> set[torch.dtype]:
    found = {result.dtype}
    nodes, seen = [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.update([entry.dtype for entry in getattr(node, "_input_metadata", ())])
            nodes += [following for following, _ in node.next_functions]
    return {kind for kind in found if kind.is_floating_point} | {result.dtype}


def _rounded(func: Any, args: tuple, kwargs: dict[str, Any], output: Tensor) -> bool:
    """Return True if an operation lost digits, by doing it again in float64."""
    if _writes(func):
        return any(isinstance(item, Tensor) and item.is_floating_point() for item in args[1:])
    args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
    if isinstance(kwargs.get("dtype"), torch.dtype):
        kwargs = {**kwargs, "dtype": torch.float64}
    try:
        again = func(*args, **kwargs)
    except (RuntimeError, TypeError):
        return True
    if not isinstance(again, Tensor) or again.shape != output.shape:
        return True
    return not torch.equal(torch.nan_to_num(again.double()), torch.nan_to_num(output.double()))


def _writes(func: Any) -> bool:
    """Return True if a function of torch writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or bool(re.fullmatch(r"__i\w+__|\w*[a-z0-9]_", name))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in _BITS else tensor


def _bits(kind: torch.dtype) -> int:
    return _BITS.get(kind, 0)
