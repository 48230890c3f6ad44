"""Views of a rollout for one call of a loss: copies that it may write into, of the types and shapes that it needs."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kltest.loss.placement import ROW_FIELDS
from kltest.rollout import Rollout, is_mapped

# Fields of up to this many numbers are copied for every call; of larger ones, writes are noticed by their version.
SMALL = 2**16
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class InputForm:
    """The types and shapes in which a loss is given its fields.

    `floats` is the type of floating-point fields, and of the mask unless that has a type of its own, `mask_type`.
    `per_token`: rewards are (B, T).
    """

    floats: torch.dtype = torch.float64
    mask_type: torch.dtype | None = None
    per_token: bool = False

    @property
    def mask(self) -> torch.dtype:
        """The type of the mask."""
        return self.mask_type or self.floats

    def may_fix(self, errors: Sequence[BaseException], accessed: Set[str]) -> bool:
        """Return True if this form may help a loss that read the fields `accessed` of other forms and raised these."""
        if self.floats == torch.float32 and not any(map(_about_types, errors)):
            return False
        if self.per_token and not accessed & ROW_FIELDS:
            return False
        if isinstance(errors[0], AssertionError):
            return False
        return "mask" in accessed or not self.mask_type

    def unlike(self, other: "InputForm") -> str:
        """Return in words how this form differs from another one."""
        parts = {
            "floats": f"{str(self.floats).removeprefix('torch.')} fields",
            "per_token": f"rewards and advantages of shape {'(B, T)' if self.per_token else '(B,)'}",
            "mask_type": f"a mask of {str(self.mask).removeprefix('torch.')}",
        }
        return " and ".join(text for name, text in parts.items() if getattr(self, name) != getattr(other, name))


# In the order in which they are tried: what says less about the loss, and costs it fewer digits, first.
INPUT_FORMS = tuple(
    InputForm(floats, mask_type, per_token)
    for per_token in (False, True)
    for floats in (torch.float64, torch.float32)
    for mask_type in (None, torch.bool)
)


def _about_types(error: BaseException) -> bool:
    return any(word in str(error).lower() for word in ("dtype", "float", "double", "scalar type"))


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
        before = tensor.detach().clone() if tensor.numel() <= SMALL and not is_mapped(tensor) else None
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
    bits = as_bits(found), as_bits(before)
    if torch.equal(*bits):
        return None
    other = bits[0] != bits[1]
    place = tuple(other.nonzero()[0].tolist())
    was, now = (part[place].item() for part in (before, found))
    digits = 6 if f"{was:.6g}" != f"{now:.6g}" else 17
    count = f" ({int(other.sum())} of {other.numel()} places differ)" if other.numel() > 1 else ""
    return f"{list(place) or 'it'} was {was:.{digits}g} and is {now:.{digits}g}{count}"


def as_bits(tensor: Tensor) -> Tensor:
    """Return floating-point numbers as the integers that have their bits, anything else as it is."""
    return tensor.view(_AS_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor


class RolloutView(Rollout):
    """View of `base` for one call of a loss, at a given β, and with rewards and advantages of zero if `unrewarded`.

    Fields are copies; those of the leaves of `base` are computed from them, as a trainer's log-probs are from
    its weights, so that writing into them is as legal here as it is there.
    """

    def __init__(
        self, base: Rollout, beta: float, form: InputForm, *, always_copy: bool, unrewarded: bool = False
    ) -> None:
        super().__init__({}, beta=beta)
        self._builders = base._builders
        self._base, self._form, self._always_copy, self._unrewarded = base, form, always_copy, unrewarded
        self._fields: dict[str, TrackedTensor] = {}

    def over(self, base: Rollout) -> "RolloutView":
        """Return such a view of another batch, or a fresh one of the same."""
        always = self._always_copy or bool(self.writes())
        return RolloutView(base, self.peek("beta"), self._form, always_copy=always, unrewarded=self._unrewarded)

    def peek(self, name: str) -> Any:
        """Return a field as the loss would get it, without noting that it was read."""
        if name in ("beta", "rollout"):
            return self._built[name]
        if name not in self._fields:
            original = self._base.peek(name)
            if self._unrewarded and name in ROW_FIELDS:
                original = torch.zeros_like(original)
            self._fields[name] = TrackedTensor.of(self._converted(name, original), original)
        return self._fields[name].tensor

    def built(self, name: str) -> Tensor | None:
        """Return a leaf of the batch if it was built."""
        return self._base.built(name)

    def writes(self) -> dict[str, str]:
        """Return the fields that the loss wrote into, with the change in words."""
        return {name: change for name, field in self._fields.items() if (change := field.change())}

    def made_trainable(self) -> set[str]:
        """Return the constants whose gradient the loss switched on, or that it left with one."""
        return {name for name, field in self._fields.items() if field.made_trainable}

    def shared(self, name: str) -> bool:
        """Return True if a write into this field has reached `base`."""
        return self._fields[name].shared

    def _converted(self, name: str, original: Tensor) -> Tensor:
        given = original
        if name in ROW_FIELDS and self._form.per_token:
            given = original[:, None].repeat(1, self._base.peek("mask").shape[1])
        if name == "mask":
            given = given.to(self._form.mask)
        elif original.dtype.is_floating_point:
            given = given.to(self._form.floats)
        copied = given is original and (self._always_copy or original.numel() <= SMALL)
        return given.clone() if copied else given


def unambiguous(rollout: Rollout) -> bool:
    """Return True if B and T differ and neither is 1, so that a (B,) field cannot pass for a (B, T) one."""
    rows, tokens = rollout.peek("mask").shape
    return 1 < rows != tokens > 1


def made_unambiguous(rollout: Rollout) -> Rollout:
    """Return an unambiguous copy with fresh leaves: a single row is repeated, and padded columns are added."""
    rows = rollout.take([0, 0] if len(rollout) == 1 else range(len(rollout)))
    while not unambiguous(rows):
        rows = rows.wider(1)
    return rows
