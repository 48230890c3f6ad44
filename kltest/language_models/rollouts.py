"""Rollouts of a language model: prompts and completions side by side, and how they are cut and joined."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

PER_TOKEN = ("tokens", "mask", "sampled_logp", "old_logp", "ref_logp")


@dataclass(frozen=True)
class Rollouts:
    """B rollouts of up to T tokens after prompts of up to P tokens.

    Attributes:
        prompts: (B, P) ids, padded on the left.
        prompt_mask: (B, P) bool, true at tokens.
        tokens: (B, T) ids of the completions, padded on the right.
        mask: (B, T) bool, true at tokens, the end token included.
        sampled_logp: (B, T) the sampler's log-probs as generation computed them, in nats.
        group: (B,) the number of the prompt.
        reward: (B,) float64, once known.
        old_logp: (B, T) the sampler's log-probs by a forward pass, once known.
        ref_logp: (B, T) the reference's log-probs, once known.
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
        """(B,) number of tokens."""
        return self.mask.sum(dim=1)

    def rows(self, which: slice | Tensor) -> "Rollouts":
        """Return some of the rows."""
        present = self._present(*(one.name for one in fields(self)))
        return replace(self, **{name: value[which] for name, value in present.items()})

    def split(self, size: int) -> Iterator[slice]:
        """Yield slices of at most `size` rows; one of all rows if `size` is 0."""
        size = size or len(self)
        return (slice(first, first + size) for first in range(0, len(self), size))

    def resized(self, width: int) -> "Rollouts":
        """Return the rollouts with T = `width`: padded on the right, or later positions cut off."""
        more = (0, width - self.tokens.shape[1])
        present = self._present(*PER_TOKEN)
        return replace(self, **{name: torch.nn.functional.pad(value, more) for name, value in present.items()})

    def _present(self, *names: str) -> dict[str, Tensor]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}
