"""Modes in which a loss runs without its bounds, or without its stop-gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.moments.differentiate import gradients_at


class WithoutBounds(TorchFunctionMode):
    """Mode in which clamp and clip return their input, and a minimum or maximum with a constant the other argument.

    Of two arguments that both vary, as in min(ρA, clip(ρ)A), the clipped one equals the other and nothing is lost.
    """

    CLAMPS = frozenset({"clamp", "clip", "clamp_min", "clamp_max"})
    CHOICES = frozenset({"minimum", "maximum", "min", "max"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.removesuffix("_") in self.CLAMPS:
            return args[0] if args else (kwargs or {})["input"]
        if name in self.CHOICES and len(args) == 2 and isinstance(args[1], Tensor):
            constant = [item.dim() == 0 for item in args]
            if any(constant) and not all(constant):
                return args[constant.index(False)]
        return func(*args, **(kwargs or {}))


class WithoutStops(TorchFunctionMode):
    """Mode in which detach, .data and no_grad have no effect, except on what depends on a tensor of `kept`."""

    STOPS = frozenset({torch.Tensor.detach, torch.detach, torch.Tensor.detach_})

    def __init__(self, kept: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._kept = list(kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stops = func in self.STOPS or func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
        if stops and not self._depends(args[0]):
            return args[0]
        if func is torch._C._set_grad_enabled:
            args = (True,)
        return func(*args, **(kwargs or {}))

    def _depends(self, tensor: Tensor) -> bool:
        if not self._kept or not tensor.requires_grad:
            return False
        found = gradients_at(tensor.sum(), self._kept)
        return any(part is not None for part in found)
