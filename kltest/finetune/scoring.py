"""Log-probs of rollouts by one forward pass over prompts and completions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kltest.finetune.generation import at_least_single
from kltest.finetune.language import Language
from kltest.finetune.rollouts import Rollouts


@dataclass(frozen=True)
class Scores:
    """`logp` (B, T) of the sampled tokens and, where asked for, `logits` (B, T, V): all next-token log-probs.

    Both have their graph. What stands at dead tokens is finite and means nothing.
    """

    logp: Tensor
    logits: Tensor | None = None


def score(language: Language, rollouts: Rollouts, *, temperature: float = 1.0, logits: bool = False) -> Scores:
    """The log-probs of softmax(logits/temperature), float32 at least."""
    # The last token predicts none; dead ones on the right need no mask, since no live token looks at them.
    ids = torch.cat([rollouts.prompts, rollouts.tokens[:, :-1]], dim=1)
    mask = None
    if not bool(rollouts.prompt_mask.all()):
        mask = torch.cat([rollouts.prompt_mask, torch.ones_like(rollouts.mask[:, 1:])], dim=1)
    raw, _ = language.forward(ids, mask, keep=rollouts.tokens.shape[1])
    scaled = at_least_single(raw) / temperature
    log_probs = scaled.log_softmax(dim=-1)
    logp = log_probs.gather(2, rollouts.tokens[:, :, None])[:, :, 0]
    return Scores(logp, log_probs if logits else None)


@torch.no_grad()
def score_in_parts(language: Language, rollouts: Rollouts, size: int, *, temperature: float = 1.0) -> Tensor:
    """(B, T) log-probs without their graph, at most `size` rows at a time, all for 0."""
    parts = [score(language, rollouts.rows(part), temperature=temperature).logp for part in rollouts.split(size)]
    return torch.cat(parts)
