"""Log-probs of rollouts by forward passes over prompts and completions.

On a CPU the cost of a pass is its arithmetic. Rollouts of one prompt therefore share its pass, gradients included, and
rollouts of similar length are scored together, without most of their padding.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kltest.language_models.generation import Rollouts, at_least_single, cache_for
from kltest.language_models.language import LanguageModel

# Most parts into which rollouts are sorted by length: more would save little padding and cost calls.
PARTS = 6
# Most logits whose log-probs, in float32 or float64, are in memory at a time unless they are returned.
LOGITS = 2**24


@dataclass(frozen=True)
class Scores:
    """Log-probs with their graph; values at padded positions are finite and mean nothing.

    Attributes:
        logp: (B, T) of the sampled tokens.
        logits: (B, T, V) of all next tokens, if requested.
    """

    logp: Tensor
    logits: Tensor | None = None


def score(language: LanguageModel, rollouts: Rollouts, *, temperature: float = 1.0, logits: bool = False) -> Scores:
    """Return the log-probs of rollouts under softmax(logits/temperature), in float32 or float64.

    Args:
        language: The policy.
        rollouts: B rollouts.
        temperature: Divisor of the logits.
        logits: True to return the log-probs of all next tokens as well.
    """
    if language.device.type == "cpu" and language.caches:
        return _by_length(language, rollouts, temperature, logits)
    return _scored(logits_of(language, rollouts), rollouts.tokens, temperature, logits)


@torch.no_grad()
def score_in_parts(language: LanguageModel, rollouts: Rollouts, size: int, *, temperature: float = 1.0) -> Tensor:
    """Return (B, T) log-probs without their graph, from at most `size` rows at a time, or from all if it is 0."""
    return torch.cat([score(language, part, temperature=temperature).logp for part in rollouts.parts(size)])


def _scored(raw: Tensor, tokens: Tensor, temperature: float, logits: bool) -> Scores:
    if logits:
        log_probs = _log_softmax(raw, temperature)
        return Scores(_at(log_probs, tokens), log_probs)

    def scored(raw: Tensor, tokens: Tensor) -> Tensor:
        return _at(_log_softmax(raw, temperature), tokens)

    steps = max(1, LOGITS // max(1, len(raw) * raw.shape[2]))
    if steps >= raw.shape[1]:
        return Scores(scored(raw, tokens))
    # The backward pass computes a piece again, so that the raw logits are all that is kept.
    again = partial(checkpoint, scored, use_reentrant=False, preserve_rng_state=False)
    pieces = zip(raw.split(steps, dim=1), tokens.split(steps, dim=1), strict=True)
    return Scores(torch.cat([again(*piece) for piece in pieces], dim=1))


def _log_softmax(raw: Tensor, temperature: float) -> Tensor:
    return (at_least_single(raw) / temperature).log_softmax(dim=-1)


def _at(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(2, tokens[:, :, None])[:, :, 0]


def logits_of(language: LanguageModel, rollouts: Rollouts, cache: Any = None) -> Tensor:
    """Return (B, T, V) logits by one pass over prompts and completions.

    A cache holds the prompts but their last token.
    """
    # The last token predicts nothing. Padding on the right needs no mask, since no live token attends to it.
    prompts = rollouts.prompts if cache is None else rollouts.prompts[:, -1:]
    ids = torch.cat([prompts, rollouts.tokens[:, :-1]], dim=1)
    mask = None
    if not bool(rollouts.prompt_mask.all()):
        mask = torch.cat([rollouts.prompt_mask, torch.ones_like(rollouts.mask[:, 1:])], dim=1)
    return language.forward(ids, mask, keep=rollouts.tokens.shape[1], cache=cache)[0]


def _by_length(language: LanguageModel, rollouts: Rollouts, temperature: float, logits: bool) -> Scores:
    cache_of = _prompts(language, rollouts)
    width, order = rollouts.tokens.shape[1], rollouts.lengths.argsort(stable=True)
    parts = []
    for rows, longest in _parts(order, rollouts.lengths):
        part = rollouts.rows(rows).resized(longest)
        scored = _scored(logits_of(language, part, cache_of(rows)), part.tokens, temperature, logits)
        parts.append(_widened(scored, width - longest))
    back = order.argsort()
    full = [part.logits for part in parts if part.logits is not None]
    return Scores(torch.cat([part.logp for part in parts])[back], torch.cat(full)[back] if full else None)


def _widened(scores: Scores, more: int) -> Scores:
    """Scores with padding on the right, where the next token is uniform."""
    full = scores.logits
    if full is not None:
        full = torch.nn.functional.pad(full, (0, 0, 0, more), value=-math.log(full.shape[2]))
    return Scores(torch.nn.functional.pad(scores.logp, (0, more)), full)


def _parts(order: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """(rows, width) of the parts, in order of length; parts of equal width are joined."""
    for longest, chunks in groupby(order.chunk(PARTS), lambda chunk: max(int(lengths[chunk[-1]]), 1)):
        yield torch.cat(list(chunks)), longest


def _prompts(language: LanguageModel, rollouts: Rollouts) -> Callable[[Tensor], Any]:
    """A function that returns the cache of the prompts of some rows: one pass over every distinct prompt.

    The pass leaves out a prompt's last token, which goes with the completion, so that all requested logits come from
    one pass: a policy and a reference that are the same model then give the same log-probs to the last bit. The cache
    is None if no two rollouts have the same prompt.
    """
    width = rollouts.prompts.shape[1]
    both = torch.cat([rollouts.prompts, rollouts.prompt_mask.long()], dim=1)
    different, place = both.unique(dim=0, return_inverse=True)
    # A prompt of one token leaves nothing to share.
    if len(different) == len(both) or int(rollouts.prompt_mask.sum(dim=1).min()) < 2:
        return lambda rows: None
    mask = different[:, width:-1].bool()
    ids = different[:, : width - 1]
    _, shared = language.forward(ids, None if bool(mask.all()) else mask, keep=1, cache=cache_for(language))

    def of_rows(rows: Tensor) -> Any:
        # A copy, since a pass adds to its cache.
        cache = copy.copy(shared)
        cache.layers = [copy.copy(layer) for layer in shared.layers]
        cache.batch_select_indices(place[rows])
        return cache

    return of_rows
