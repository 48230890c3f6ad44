"""Rollouts: prompts and completions side by side, sampled in batches that share the forward pass of a prompt.

Each token is chosen by a uniform number that the caller gives: it is the first token whose cumulative probability
exceeds that number. The same uniforms and the same model give the same rollouts, however rows are spread over
processes, and after a restart. Nothing is truncated (no top-k, no top-p), so the sampler's log-probs are the policy's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kltest.language_models.language import LanguageModel, padded

PER_TOKEN = ("tokens", "mask", "sampled_logp", "old_logp", "ref_logp", "topk_ids", "ref_topk_logp")


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
        topk_ids: (B, T, K) ids of the tokens of a support, if it came with the rollouts.
        ref_topk_logp: (B, T, K) the reference's log-probs of them, likewise.
        gold: (B,) float64, a score that training does not see, if the task has one and it is known.
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
    topk_ids: Tensor | None = None
    ref_topk_logp: Tensor | None = None
    gold: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """(B,) number of tokens."""
        return self.mask.sum(dim=1)

    def ended(self, end: Sequence[int]) -> Tensor:
        """(B,) true where the last token is an end token."""
        last = self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]
        return torch.isin(last, torch.tensor(end, device=last.device))

    def rows(self, which: slice | Tensor) -> "Rollouts":
        """Return some of the rows."""
        present = self._present(*(one.name for one in fields(self)))
        return replace(self, **{name: value[which] for name, value in present.items()})

    def split(self, size: int) -> Iterator[slice]:
        """Yield slices of at most `size` rows; one of all rows if `size` is 0."""
        size = size or len(self)
        return (slice(first, first + size) for first in range(0, len(self), size))

    def parts(self, size: int) -> "Iterator[Rollouts]":
        """Yield the rollouts of `split`."""
        return (self.rows(part) for part in self.split(size))

    def resized(self, width: int) -> "Rollouts":
        """Return the rollouts with T = `width`: padded on the right, or later positions cut off."""
        more = (0, width - self.tokens.shape[1])
        present = self._present(*PER_TOKEN)
        padded = {name: pad(value, (0, 0) * (value.dim() - 2) + more) for name, value in present.items()}
        return replace(self, **padded)

    def _present(self, *names: str) -> dict[str, Tensor]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


# Tokens between two looks at whether all rollouts have ended, on an accelerator: each look waits for the device.
CHECK_EVERY = 8
# On a CPU, rollouts that have ended are dropped once the living ones are at most this share of the rows.
COMPACT_BELOW = 0.8


@torch.no_grad()
def generate(
    language: LanguageModel, prompts: Sequence[Sequence[int]], uniforms: Tensor, *, temperature: float = 1.0
) -> Rollouts:
    """Sample rollouts from softmax(logits/temperature).

    Args:
        language: The sampler.
        prompts: N lists of ids.
        uniforms: (B, T) from [0, 1), one a token; B is a multiple of N, and T the longest rollout.
        temperature: Divisor of the logits.

    Returns:
        B rollouts, the B/N of one prompt after each other, as wide as the longest one is.

    Raises:
        UsageError: A prompt and its completion would be longer than the model allows.
    """
    device = language.device
    rows, longest = uniforms.shape
    each = rows // len(prompts)
    ids, mask = (part.to(device) for part in padded(prompts, language.pad))  # (N, P)
    language.check_length(ids.shape[1], longest)
    whole = None if bool(mask.all()) else mask
    logits, cache = language.forward(ids, whole, keep=1, cache=cache_for(language))
    logits = logits[:, -1].repeat_interleave(each, dim=0)  # (B, V)
    if each > 1 and cache is not None:
        cache.batch_repeat_interleave(each)
    ids, mask = ids.repeat_interleave(each, dim=0), mask.repeat_interleave(each, dim=0)  # (B, P)
    seen = None if whole is None else mask
    uniforms, ends = uniforms.to(device), torch.tensor(language.end, device=device)
    tokens = torch.full((rows, longest), language.pad, device=device)
    logps = torch.zeros((rows, longest), dtype=at_least_single(logits).dtype, device=device)
    living = torch.zeros((rows, longest), dtype=torch.bool, device=device)
    here = torch.arange(rows, device=device)  # the rows that still go on
    alive = torch.ones(rows, dtype=torch.bool, device=device)
    for step in range(longest):
        token, logp = _chosen(logits, uniforms[here, step], temperature)
        token = token.where(alive, language.pad)
        tokens[here, step], logps[here, step], living[here, step] = token, logp, alive
        alive = alive & (token[:, None] != ends).all(dim=1)
        if step == longest - 1:
            break
        if device.type == "cpu" or step % CHECK_EVERY == CHECK_EVERY - 1:
            left = int(alive.sum())
            if not left:
                break
            if device.type == "cpu" and left <= COMPACT_BELOW * len(here):
                rest = alive.nonzero()[:, 0]
                here, alive, token = here[rest], alive[rest], token[rest]
                if cache is not None:
                    cache.batch_select_indices(rest)
                seen = None if seen is None else seen[rest]
        seen = None if seen is None else torch.cat([seen, seen.new_ones(len(token), 1)], dim=1)
        # Without a cache the model reads everything again.
        more = token[:, None] if cache is not None else torch.cat([ids[here], tokens[here, : step + 1]], dim=1)
        logits, cache = language.forward(more, seen, keep=1, cache=cache)
        logits = logits[:, -1]  # (B, V)
    width = int(living.any(dim=0).sum())
    return Rollouts(
        prompts=ids,
        prompt_mask=mask,
        tokens=tokens[:, :width],
        mask=living[:, :width],
        sampled_logp=logps[:, :width],
        group=torch.arange(rows, device=device) // each,
    )


def _chosen(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probs (B,); sums are float64 for the small probabilities of large vocabularies."""
    log_probs = (at_least_single(logits) / temperature).log_softmax(dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    reached = torch.searchsorted(cumulative, (uniform.double() * cumulative[:, -1])[:, None], right=True)
    token = reached.clamp(max=logits.shape[-1] - 1)
    return token[:, 0], log_probs.gather(1, token)[:, 0]


def at_least_single(logits: Tensor) -> Tensor:
    """Return the logits in float32, or in float64 if they are: half-precision log-probs are a coarser policy's."""
    return logits if logits.dtype == torch.float64 else logits.float()


def cache_for(language: LanguageModel) -> Any:
    """Return an empty key-value cache of the model's kind; None if it has none."""
    from transformers import DynamicCache

    if not language.caches:
        return None
    return DynamicCache(config=getattr(language.model, "config", None))
