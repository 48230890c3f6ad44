"""Tensors given to a loss, and what it did to them: writes found bit for bit, gradients switched on."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Fields of up to this many numbers are copied for every call; of larger ones, writes are noticed by their version.
SMALL = 2**16

FEW = 2**10
"""Up to this many numbers, bytes are compared faster in Python than bits in torch."""

_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class TrackedTensor:
    """A tensor given to a loss, or parts of it, one a rollout (`items`); `before` is its former content, if kept.

    `trainable` and `version` are the tensor's own at that moment.
    """

    tensor: Tensor
    before: Tensor | None
    trainable: bool
    version: int
    items: list[Tensor] | None = None
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def as_tensor(cls, tensor: Tensor, original: Tensor) -> "TrackedTensor":
        """Track a field in one piece; `original` is the rollout's own."""
        before: Tensor | None = original.detach()
        if tensor is original:
            before = None
        elif tensor.dtype != original.dtype or tensor.shape != original.shape:
            before = tensor.detach().clone() if tensor.numel() <= SMALL else None
        return cls(tensor, before, tensor.requires_grad, tensor._version)

    @classmethod
    def as_list(cls, field_: Tensor, live: Tensor) -> "TrackedTensor":
        """Track a field as RL loops store it: one tensor of live tokens a rollout, all parts of one stored tensor."""
        lengths = live.sum(dim=1).tolist()
        whole = field_[live] if field_.dim() > 1 else field_.clone()
        before = whole.detach().clone()
        ends = torch.tensor(lengths).cumsum(0).tolist()
        if field_.dim() == 1:
            items, lengths = [whole[row] for row in range(len(whole))], [1] * len(whole)
        else:
            # Slices and no split: torch lets nobody write into the parts that a split gives.
            items = [whole[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        return cls(whole, before, whole.requires_grad, whole._version, items, lengths)

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
        if (found := difference(self.tensor.detach(), self.before)) or self.items is None:
            return found
        exchanged = [item.numel() if isinstance(item, Tensor) else -1 for item in self.items] != self.lengths
        if exchanged or difference(torch.cat([item.detach().flatten() for item in self.items]), self.before.flatten()):
            return "items of its list were exchanged"
        return None

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
    if found.numel() <= FEW and found.dtype == torch.float64 and not (found.requires_grad or before.requires_grad):
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
