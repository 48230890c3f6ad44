"""Rollouts of a language model: prompts and completions side by side, and how they are cut and joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollouts:
    """B rollouts of up to T tokens behind prompts of up to P, which have their padding on the left.

    `prompts` (B, P) and `tokens` (B, T) are ids, `prompt_mask` and `mask` true at tokens, the end token included.
    `sampled_logp` (B, T) are the sampler's log-probs as generation computed them, `group` (B,) says which prompt.
    `reward` (B,), and the log-probs (B, T) of the sampler and the reference, are there once they are known.
    """

    prompts: Tensor
    prompt_mask: Tensor
    tokens: Tensor
    mask: Tensor
    sampled_logp: Tensor
    group: Tensor
    reward: Tensor | None = None
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens of each."""
        return self.mask.sum(dim=1)

    def rows(self, which: slice | Tensor) -> Rollouts:
        """Some of the rows."""
        present = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: value[which] for name, value in present.items() if value is not None})

    def split(self, size: int) -> Iterator[slice]:
        """The rows, at most `size` at a time, all for 0."""
        size = size or len(self)
        return (slice(first, first + size) for first in range(0, len(self), size))

    def narrowed(self, tokens: int) -> Rollouts:
        """The same with the first `tokens` tokens alone."""
        along = ("tokens", "mask", "sampled_logp", "old_logp", "ref_logp")
        present: dict[str, Tensor] = {name: value for name in along if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[:, :tokens] for name, value in present.items()})

    def widened(self, tokens: int) -> Rollouts:
        """The same with T as given, dead tokens added on the right."""
        more = tokens - self.tokens.shape[1]
        along = ("tokens", "mask", "sampled_logp", "old_logp", "ref_logp")
        present: dict[str, Tensor] = {name: value for name in along if (value := getattr(self, name)) is not None}
        return replace(self, **{name: torch.nn.functional.pad(value, (0, more)) for name, value in present.items()})
