"""A causal language model with its tokenizer: what generation and scoring need of the two, whoever made them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kltest.errors import UsageError


@dataclass(frozen=True)
class Language:
    """`model` maps ids to next-token logits as Hugging Face's causal models do; `end` are the ids that end a rollout.

    `pad` stands where there is no token; masks say where that is, so that it may be any id, an end token's included.
    `passes` is the type in which forward passes compute where it is not that of the weights; `compiled` is the model as
    torch.compile made it, for passes without a cache. With `chat` a prompt is a user's message in the tokenizer's
    template.
    """

    model: nn.Module
    tokenizer: Any
    end: tuple[int, ...]
    pad: int
    passes: torch.dtype | None = None
    compiled: Any = None
    chat: bool = False

    @classmethod
    def of(cls, model: Any, tokenizer: Any, passes: torch.dtype | None = None, *, chat: bool = False) -> Language:
        """UsageError for a model that names no end token, since its rollouts would never end, and for a chat without a
        template.
        """
        if chat and not getattr(tokenizer, "chat_template", None):
            raise UsageError("chat: the model's tokenizer has no chat template; set chat=false")
        named = getattr(model, "generation_config", None)
        for source in (getattr(named, "eos_token_id", None), tokenizer.eos_token_id):
            if source is not None:
                end = tuple(source) if isinstance(source, list | tuple) else (int(source),)
                break
        else:
            raise UsageError("the model and its tokenizer name no end token (eos_token_id); give the tokenizer one")
        pad = end[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        return cls(model, tokenizer, end, pad, passes, chat=chat)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def caches(self) -> bool:
        """Whether a pass can go on from an earlier one."""
        return "past_key_values" in _accepted(type(self.model))

    def frozen(self) -> Language:
        """A copy that stays as the model is now."""
        return replace(self, model=copy.deepcopy(self.model).requires_grad_(False), compiled=None)

    def encode(self, prompt: str) -> list[int]:
        """UsageError for a prompt without tokens: there would be nothing to predict the first one from."""
        if self.chat:
            message = [{"role": "user", "content": prompt}]
            try:
                encoded = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
            except Exception as error:
                raise UsageError(f"chat: the tokenizer's template fails on the prompt {prompt!r}: {error}") from error
        else:
            encoded = self.tokenizer(prompt)
        ids = list(encoded["input_ids"])
        if not ids:
            raise UsageError(f"the tokenizer makes no token of the prompt {prompt!r}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a rollout, without end tokens and padding."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def forward(self, ids: Tensor, mask: Tensor | None, *, keep: int, cache: Any = None) -> tuple[Tensor, Any]:
        """Logits of the last `keep` of the ids (B, L), and the cache with them added, if one is given.

        `mask` (B, M + L) is true at tokens, those of the cache included; None where all are. Positions count tokens.
        """
        accepted = _accepted(type(self.model))
        options: dict[str, Any] = {"use_cache": cache is not None, "past_key_values": cache, "attention_mask": mask}
        if mask is not None:
            positions = mask.long().cumsum(dim=1).sub_(1).clamp_(min=0)
            options["position_ids"] = positions[:, -ids.shape[1] :]
            options["attention_mask"] = mask.long()
        if "logits_to_keep" in accepted or "kwargs" in accepted:
            options["logits_to_keep"] = keep
        given = {name: value for name, value in options.items() if name in accepted}
        lower = nullcontext() if self.passes is None else torch.autocast(ids.device.type, dtype=self.passes)
        with lower:
            answer = (self.model if self.compiled is None or cache is not None else self.compiled)(
                input_ids=ids, **given
            )
        return answer.logits[:, -keep:], getattr(answer, "past_key_values", None)


_ACCEPTED: dict[type[nn.Module], frozenset[str]] = {}


def _accepted(kind: type[nn.Module]) -> frozenset[str]:
    """The parameters of a model's forward pass: old architectures lack some."""
    if kind not in _ACCEPTED:
        _ACCEPTED[kind] = frozenset(inspect.signature(kind.forward).parameters)
    return _ACCEPTED[kind]


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids (N, P) with padding on the left, and the mask (N, P) that is true at tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return ids, mask
