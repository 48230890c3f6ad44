"""Log-probs of rollouts by forward passes over prompts and completions.

On a CPU arithmetic is what a pass costs, so none is done twice or for nothing: rollouts of one prompt share its pass,
gradients included, and rollouts of about one length are scored together, without most of their padding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kltest.language_models.generation import at_least_single, cache_for
from kltest.language_models.language import Language
from kltest.language_models.rollouts import Rollouts

PARTS = 6
"""Rollouts are sorted by length into at most so many parts: more save little padding and cost calls."""


@dataclass(frozen=True)
class Scores:
    """`logp` (B, T) of the sampled tokens and, where asked for, `logits` (B, T, V): all next-token log-probs.

    Both have their graph. What stands at dead tokens is finite and means nothing.
    """

    logp: Tensor
    logits: Tensor | None = None


def score(language: Language, rollouts: Rollouts, *, temperature: float = 1.0, logits: bool = False) -> Scores:
    """The log-probs of softmax(logits/temperature), float32 at least."""
    if language.device.type == "cpu" and language.compiled is None and language.caches:
        return _by_length(language, rollouts, temperature, logits)
    return _scored(_whole(language, rollouts), rollouts.tokens, temperature, logits)


@torch.no_grad()
def score_in_parts(language: Language, rollouts: Rollouts, size: int, *, temperature: float = 1.0) -> Tensor:
    """(B, T) log-probs without their graph, at most `size` rows at a time, all for 0."""
    parts = [score(language, rollouts.rows(part), temperature=temperature).logp for part in rollouts.split(size)]
    return torch.cat(parts)


def _scored(raw: Tensor, tokens: Tensor, temperature: float, logits: bool) -> Scores:
    log_probs = (at_least_single(raw) / temperature).log_softmax(dim=-1)
    return Scores(log_probs.gather(2, tokens[:, :, None])[:, :, 0], log_probs if logits else None)


def _whole(language: Language, rollouts: Rollouts) -> Tensor:
    """(B, T, V) by one pass over prompts and completions."""
    # The last token predicts none; dead ones on the right need no mask, since no live token looks at them.
    ids = torch.cat([rollouts.prompts, rollouts.tokens[:, :-1]], dim=1)
    mask = None
    if not bool(rollouts.prompt_mask.all()):
        mask = torch.cat([rollouts.prompt_mask, torch.ones_like(rollouts.mask[:, 1:])], dim=1)
    return language.forward(ids, mask, keep=rollouts.tokens.shape[1])[0]


def _by_length(language: Language, rollouts: Rollouts, temperature: float, logits: bool) -> Scores:
    shared = _Shared.of(language, rollouts)
    width, order = rollouts.tokens.shape[1], rollouts.lengths.argsort(stable=True)
    parts = []
    for rows, longest in _parts(order, rollouts.lengths):
        part = rollouts.rows(rows).narrowed(longest)
        raw = _whole(language, part) if shared is None else shared.completed(language, part, rows)
        scored = _scored(raw, part.tokens, temperature, logits)
        parts.append(_widened(scored, width - longest))
    back = order.argsort()
    full = [part.logits for part in parts if part.logits is not None]
    return Scores(torch.cat([part.logp for part in parts])[back], torch.cat(full)[back] if full else None)


def _widened(scores: Scores, more: int) -> Scores:
    """With dead tokens on the right, of which all next tokens are as likely."""
    full = scores.logits
    if full is not None:
        full = torch.nn.functional.pad(full, (0, 0, 0, more), value=-math.log(full.shape[2]))
    return Scores(torch.nn.functional.pad(scores.logp, (0, more)), full)


def _parts(order: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Rows in order of length, in parts, with the longest's length; parts that are as long are one."""
    kept: list[Tensor] = []
    chunks = order.chunk(PARTS)
    longest = [max(int(lengths[chunk[-1]]), 1) for chunk in chunks]
    for chunk, here, after in zip(chunks, longest, [*longest[1:], 0], strict=True):
        kept.append(chunk)
        if here != after:
            yield torch.cat(kept), here
            kept = []


@dataclass(frozen=True)
class _Shared:
    """The pass over prompts that several rollouts have, but for their last token: what later ones look back at.

    The last one goes with the completion, so that all logits that are wanted come from one pass: then a policy and a
    reference that are the same model give the same log-probs to the last bit.
    """

    place: Tensor
    cache: Any

    @classmethod
    def of(cls, language: Language, rollouts: Rollouts) -> _Shared | None:
        """None where no two rollouts have one prompt."""
        width = rollouts.prompts.shape[1]
        both = torch.cat([rollouts.prompts, rollouts.prompt_mask.long()], dim=1)
        different, place = both.unique(dim=0, return_inverse=True)
        # A prompt of one token has nothing before its last.
        if len(different) == len(both) or int(rollouts.prompt_mask.sum(dim=1).min()) < 2:
            return None
        mask = different[:, width:-1].bool()
        ids = different[:, : width - 1]
        _, cache = language.forward(ids, None if bool(mask.all()) else mask, keep=1, cache=cache_for(language))
        return cls(place, cache)

    def completed(self, language: Language, part: Rollouts, rows: Tensor) -> Tensor:
        """(B, T, V) of a part of the rollouts, behind the prompts' pass."""
        later = torch.cat([part.prompts[:, -1:], part.tokens[:, :-1]], dim=1)
        mask = None
        if not bool(part.prompt_mask.all()):
            mask = torch.cat([part.prompt_mask, torch.ones_like(part.mask[:, 1:])], dim=1)
        # A pass adds to its cache: that of the prompts is for other parts as well.
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        cache.batch_select_indices(self.place[rows])
        return language.forward(later, mask, keep=later.shape[1], cache=cache)[0]
