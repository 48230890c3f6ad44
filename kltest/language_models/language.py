"""A causal language model with its tokenizer: the interface that generation and scoring need."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kltest.errors import UsageError


@dataclass(frozen=True)
class LanguageModel:
    """A policy over token sequences.

    Attributes:
        model: Maps ids (B, L) to next-token logits (B, L, V), as Hugging Face's causal models do.
        tokenizer: Encodes prompts and decodes completions.
        end: Ids that end a rollout.
        pad: Id at padded positions. It may be any id, an end token's included: masks say where the tokens are.
        compute_dtype: Dtype of forward passes if it is not that of the weights.
        compiled: The model as torch.compile returned it, for passes without a cache.
        chat: True to send a prompt as a user message through the tokenizer's chat template.
    """

    model: nn.Module
    tokenizer: Any
    end: tuple[int, ...]
    pad: int
    compute_dtype: torch.dtype | None = None
    compiled: Any = None
    chat: bool = False

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any, compute_dtype: torch.dtype | None = None, *, chat: bool = False
    ) -> LanguageModel:
        """Return a model with the end and padding ids that its configuration or tokenizer names.

        Raises:
            UsageError: There is no end token, so that no rollout would end; or no template for a chat.
        """
        if chat and not getattr(tokenizer, "chat_template", None):
            raise UsageError("chat: the model's tokenizer has no chat template; set chat=false")
        configured = getattr(model, "generation_config", None)
        for source in (getattr(configured, "eos_token_id", None), tokenizer.eos_token_id):
            if source is not None:
                end = tuple(source) if isinstance(source, list | tuple) else (int(source),)
                break
        else:
            raise UsageError("the model and its tokenizer name no end token (eos_token_id); give the tokenizer one")
        pad = end[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        return cls(model, tokenizer, end, pad, compute_dtype, chat=chat)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def caches(self) -> bool:
        """True if a forward pass can continue from an earlier one."""
        return "past_key_values" in _parameters_of_forward(self.model)

    def frozen(self) -> LanguageModel:
        """Return a copy with the present weights, which require no gradient."""
        return replace(self, model=copy.deepcopy(self.model).requires_grad_(False), compiled=None)

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt.

        Raises:
            UsageError: The prompt has no token to predict the first one from, or the chat template fails on it.
        """
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
        """Return the text of a rollout, without end tokens and padding."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def forward(self, ids: Tensor, mask: Tensor | None, *, keep: int, cache: Any = None) -> tuple[Tensor, Any]:
        """Run the model over some more ids.

        Args:
            ids: (B, L) the ids to add.
            mask: (B, M + L) true at tokens, with the M positions of the cache first; None if all are tokens.
            keep: The number of last positions whose logits are returned.
            cache: Keys and values of the M positions before; they are added to.

        Returns:
            Logits (B, keep, V), and the cache.
        """
        options: dict[str, Any] = {
            "use_cache": cache is not None,
            "past_key_values": cache,
            "attention_mask": mask,
            "logits_to_keep": keep,
        }
        if mask is not None:
            # Positions count tokens, so that padding on the left changes nothing.
            positions = mask.long().cumsum(dim=1).sub_(1).clamp_(min=0)
            options["position_ids"] = positions[:, -ids.shape[1] :]
            options["attention_mask"] = mask.long()
        # Old architectures take fewer options.
        accepted = _parameters_of_forward(self.model)
        options = {name: value for name, value in options.items() if name in accepted}
        model = self.model if self.compiled is None or cache is not None else self.compiled
        lower = self.compute_dtype
        with nullcontext() if lower is None else torch.autocast(ids.device.type, dtype=lower):
            answer = model(input_ids=ids, **options)
        return answer.logits[:, -keep:], getattr(answer, "past_key_values", None)


def _parameters_of_forward(model: nn.Module) -> frozenset[str]:
    return _parameters_of(type(model).forward)


@cache
def _parameters_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return ids (N, P) padded on the left, and the mask (N, P) that is true at tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return ids, mask
