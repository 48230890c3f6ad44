"""Tensors given to a loss, and what it did to them: writes found bit for bit, gradients switched on."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Fields of up to this many numbers are copied for every call; of larger ones, writes are noticed by their version.
SMALL = 2**16
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TrackedTensor:
    """A tensor given to a loss; `before` is its former content, None if it is large.

    If `shared`, a write reaches other calls. `trainable` and `version` are the tensor's own before the call.
    """

    tensor: Tensor
    shared: bool
    before: Tensor | None
    trainable: bool
    version: int

    @classmethod
    def of(cls, tensor: Tensor, original: Tensor) -> "TrackedTensor":
        """Track a field; `original` is the rollout's own."""
        before = tensor.detach().clone() if tensor.numel() <= SMALL else None
        return cls(tensor, tensor is original, before, tensor.requires_grad, tensor._version)

    def change(self) -> str | None:
        """Return the change in words; None if every bit is the same."""
        if self.before is None:
            return None if self.tensor._version == self.version else "it was written into"
        return difference(self.tensor.detach(), self.before)

    @property
    def made_trainable(self) -> bool:
        """True if a constant now requires a gradient, or has one."""
        if self.trainable or not self.tensor.is_leaf:
            return False
        return self.tensor.requires_grad or self.tensor.grad is not None


def difference(found: Tensor, before: Tensor) -> str | None:
    """Return in words where two tensors differ in any bit (a NaN equals the same NaN, −0 is not 0); None if nowhere."""
    if found.shape != before.shape or found.dtype != before.dtype:
        return f"its shape {tuple(before.shape)} became {tuple(found.shape)}"
    other = _bits(found) != _bits(before)
    if not other.any():
        return None
    place = tuple(other.nonzero()[0].tolist())
    count = f" ({int(other.sum())} of {other.numel()} places differ)" if other.numel() > 1 else ""
    return f"{list(place) or 'it'} was {before[place].item()} and is {found[place].item()}{count}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_AS_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor
