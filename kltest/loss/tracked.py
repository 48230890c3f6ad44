"""Tensors given to a loss, and what it did to them: writes found bit for bit, gradients switched on."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Fields of up to this many numbers are copied for every call; of larger ones, writes are noticed by their version.
SMALL = 2**16

FEW = 2**10
"""Up to this many numbers, bytes are compared faster in Python than bits in torch."""

_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class TrackedTensor:
    """A tensor given to a loss; `before` is its former content, if kept.

    `trainable` and `version` are the tensor's own at that moment.
    """

    tensor: Tensor
    before: Tensor | None
    trainable: bool
    version: int

    @classmethod
    def of(cls, tensor: Tensor, original: Tensor) -> "TrackedTensor":
        """Track a field; `original` is the rollout's own."""
        before: Tensor | None = original.detach()
        if tensor is original:
            before = None
        elif tensor.dtype != original.dtype or tensor.shape != original.shape:
            before = tensor.detach().clone() if tensor.numel() <= SMALL else None
        return cls(tensor, before, tensor.requires_grad, tensor._version)

    @property
    def shared(self) -> bool:
        """True if there is no copy, so that a write reaches other calls."""
        return self.before is None

    def change(self) -> str | None:
        """Return the change in words; None if every bit is the same."""
        untouched = self.tensor._version == self.version
        if self.before is None:
            return None if untouched else "it was written into"
        if untouched and self.tensor.numel() > SMALL:
            return None
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
    # Where an experiment lifts the stops of gradients, even what was detached is no plain number.
    plain = found.dtype == torch.float64 and found.is_cpu and not (found.requires_grad or before.requires_grad)
    if found.numel() <= FEW and plain:
        if found.numpy().tobytes() == before.numpy().tobytes():
            return None
    elif torch.equal(_bits(found), _bits(before)):
        return None
    other = _bits(found) != _bits(before)
    place = tuple(other.nonzero()[0].tolist())
    digits = 6 if f"{before[place].item():.6g}" != f"{found[place].item():.6g}" else 17
    was, now = (f"{part[place].item():.{digits}g}" for part in (before, found))
    count = f" ({int(other.sum())} of {other.numel()} places differ)" if other.numel() > 1 else ""
    return f"{list(place) or 'it'} was {was} and is {now}{count}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_AS_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor
