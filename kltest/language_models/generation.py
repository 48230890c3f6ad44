"""Sampling completions in batches, with a key-value cache; rollouts of one prompt share its first pass.

A token is chosen by a uniform that comes from outside: it is the first whose cumulative probability exceeds it. Who
gives the same uniforms to the same model gets the same rollouts, however rows are spread over processes, and after a
restart as well. Nothing is truncated (no top-k, no top-p), so that the sampler's log-probs are those of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kltest.language_models.decoding import decoder
from kltest.language_models.language import Language, padded
from kltest.language_models.rollouts import Rollouts

LOOK = 8
"""On an accelerator it is asked so often whether all rollouts have ended: each question waits for the device."""
WORTH = 0.8
"""On a CPU rollouts that have ended are left out as soon as no more than this share of the rows goes on."""


@torch.no_grad()
def generate(
    language: Language, prompts: Sequence[Sequence[int]], uniforms: Tensor, *, temperature: float = 1.0
) -> Rollouts:
    """Rollouts of N prompts, G = B/N of each, one after the other, of up to T tokens, by uniforms (B, T) from [0, 1).

    Sampled from softmax(logits/temperature). T of the result is the longest rollout's length.
    """
    device = language.device
    rows, longest = uniforms.shape
    each = rows // len(prompts)
    ids, mask = (part.to(device) for part in padded(prompts, language.pad))
    whole = None if bool(mask.all()) else mask
    cache = cache_for(language)
    logits, cache = language.forward(ids, whole, keep=1, cache=cache)
    logits = logits[:, -1].repeat_interleave(each, dim=0)
    if each > 1:
        cache.batch_repeat_interleave(each)
    seen = None if whole is None else whole.repeat_interleave(each, dim=0)
    going_on = decoder(language, cache, seen, ids.shape[1], longest)
    uniforms, ends = uniforms.to(device), torch.tensor(language.end, device=device)
    tokens = torch.full((rows, longest), language.pad, device=device)
    logps = torch.zeros((rows, longest), dtype=at_least_single(logits).dtype, device=device)
    living = torch.zeros((rows, longest), dtype=torch.bool, device=device)
    here = torch.arange(rows, device=device)
    alive = torch.ones(rows, dtype=torch.bool, device=device)
    for step in range(longest):
        token, logp = _chosen(logits, uniforms[here, step], temperature)
        token = token.where(alive, language.pad)
        tokens[here, step], logps[here, step], living[here, step] = token, logp, alive
        alive = alive & (token[:, None] != ends).all(dim=1)
        if step == longest - 1:
            break
        if device.type == "cpu" or step % LOOK == LOOK - 1:
            left = int(alive.sum())
            if not left:
                break
            if device.type == "cpu" and left <= WORTH * len(here):
                kept = alive.nonzero()[:, 0]
                here, alive, token = here[kept], alive[kept], token[kept]
                going_on.keep(kept)
        logits = going_on.next(token)
    width = int(living.any(dim=0).sum())
    return Rollouts(
        prompts=ids.repeat_interleave(each, dim=0),
        prompt_mask=mask.repeat_interleave(each, dim=0),
        tokens=tokens[:, :width],
        mask=living[:, :width],
        sampled_logp=logps[:, :width],
        group=torch.arange(rows, device=device) // each,
    )


def _chosen(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probs; sums are float64, so that small probabilities of large vocabularies count."""
    log_probs = (at_least_single(logits) / temperature).log_softmax(dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    reached = torch.searchsorted(cumulative, (uniform.double() * cumulative[:, -1])[:, None], right=True)
    token = reached.clamp(max=logits.shape[-1] - 1)
    return token[:, 0], log_probs.gather(1, token)[:, 0]


def at_least_single(logits: Tensor) -> Tensor:
    """In float32, or float64 where they are: log-probs in half precision would be a coarser policy's."""
    return logits if logits.dtype == torch.float64 else logits.float()


def cache_for(language: Language) -> object:
    """An empty cache of the model's kind."""
    from transformers import DynamicCache

    return DynamicCache(config=getattr(language.model, "config", None))
