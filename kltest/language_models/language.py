"""A causal language model with its tokenizer: the interface that generation and scoring need."""

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kltest.errors import UsageError

# A logit whose probability is zero in float64; a difference of two of its log-probs is finite, as one of −inf is not.
NEVER = -1e4


@dataclass(frozen=True)
class LanguageModel:
    """A policy over token sequences.

    Attributes:
        model: Maps ids (B, L) to next-token logits (B, L, V), as Hugging Face's causal models do.
        tokenizer: Encodes prompts and decodes completions.
        end: Ids that end a rollout; none if all rollouts have as many tokens as were asked for.
        pad: Id at padded positions. It may be any id, an end token's included: masks say where the tokens are.
        compute_dtype: Dtype of forward passes if it is not that of the weights.
        bare: True for a model without its adapters: the reference of a policy that shares its weights.
        never: Ids of probability zero.
    """

    model: nn.Module
    tokenizer: Any
    end: tuple[int, ...]
    pad: int
    compute_dtype: torch.dtype | None = None
    bare: bool = False
    never: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, compute_dtype: torch.dtype | None = None) -> "LanguageModel":
        """Return a model with the end and padding ids that its configuration or tokenizer names.

        A LanguageModel is returned as it is.

        Raises:
            UsageError: There is no end token, so that no rollout would end, or it is none of the model's ids.
        """
        if isinstance(model, cls):
            return model
        configuration = getattr(model, "generation_config", None) or getattr(model, "config", None)
        named = getattr(configuration, "eos_token_id", None)
        named = getattr(tokenizer, "eos_token_id", None) if named is None else named
        if named is None:
            raise UsageError("the model and its tokenizer name no end token (eos_token_id); give one of them one")
        end = tuple(named) if isinstance(named, list | tuple) else (int(named),)
        pad = getattr(configuration if tokenizer is None else tokenizer, "pad_token_id", None)
        pad = end[0] if pad is None else int(pad)
        made = cls(model, tokenizer, end, pad, compute_dtype)
        if not 0 <= min(end) <= max(end) < made.vocabulary:
            raise UsageError(
                f"the end tokens {list(end)} are not all among the model's {made.vocabulary} ids, so that no rollout "
                "would end; correct eos_token_id in the model's configuration"
            )
        return made

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def vocabulary(self) -> int:
        """The number of ids that the model knows."""
        return int(self.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]

    def check_length(self, prompt: int, completion: int) -> None:
        """Raise UsageError if a prompt and a completion of so many tokens are too long for the model."""
        config: Any = getattr(self.model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        positions = getattr(text, "max_position_embeddings", None) or math.inf
        if prompt + completion - 1 > positions:  # the last token is not read
            raise UsageError(
                f"a prompt of {prompt} tokens and a completion of {completion} are too long for the model's "
                f"{positions} positions; lower max_tokens, or give shorter prompts"
            )

    @property
    def caches(self) -> bool:
        """True if a forward pass can continue from an earlier one."""
        return "past_key_values" in options_of(type(innermost(self.model)).forward)

    def of_fixed_length(self) -> "LanguageModel":
        """Return the model without end tokens: these, like all special tokens, get probability zero."""
        special = getattr(self.tokenizer, "all_special_ids", ())
        return replace(self, end=(), never=tuple(sorted({*self.end, *special})))

    def frozen(self) -> "LanguageModel":
        """Return a copy with the present weights, which require no gradient.

        Matrices have `compute_dtype`: autocast keeps no casts of weights without a gradient. Embeddings, which it
        leaves as they are, may share a matrix.
        """
        model = copy.deepcopy(self.model).requires_grad_(False)
        self.cast(model)
        return replace(self, model=model)

    def cast(self, model: nn.Module) -> None:
        """Change matrices without a gradient to `compute_dtype`."""
        shared = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        for one in model.modules():
            constant = isinstance(one, nn.Linear) and not one.weight.requires_grad and id(one.weight) not in shared
            if self.compute_dtype and constant:
                one.to(self.compute_dtype)

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt; UsageError if it has no token to predict the first one from."""
        ids = list(self.tokenizer(prompt)["input_ids"])
        if not ids:
            raise UsageError(f"the tokenizer makes no token of the prompt {prompt!r}")
        return ids

    def texts(self, ids: Tensor, mask: Tensor) -> list[str]:
        """Return the texts of ids (B, T) that are true in `mask` (B, T), without end tokens."""
        rows = zip(ids.cpu(), mask.cpu(), strict=True)
        return [str(self.tokenizer.decode(row[live].tolist(), skip_special_tokens=True)) for row, live in rows]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of `compute_dtype`; several passes in one such context cast the weights once."""
        lower = self.compute_dtype
        return nullcontext() if lower is None else torch.autocast(self.device.type, dtype=lower)

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
        options = {"use_cache": cache is not None, "past_key_values": cache, "logits_to_keep": keep}
        if mask is not None:
            # Positions count tokens, so that padding on the left changes nothing.
            positions = mask.long().cumsum(dim=1).sub_(1).clamp_(min=0)
            options |= {"attention_mask": mask.long(), "position_ids": positions[:, -ids.shape[1] :]}
        # Old architectures take fewer options.
        accepted = options_of(type(innermost(self.model)).forward)
        with without_adapters(self.model) if self.bare else nullcontext(), self.autocast():
            answer = self.model(input_ids=ids, **{name: value for name, value in options.items() if name in accepted})
        logits = answer.logits[:, -keep:]
        if self.never:
            logits = logits.index_fill(-1, torch.tensor(self.never, device=logits.device), NEVER)
        return logits, getattr(answer, "past_key_values", None)


def unwrapped(model: Any) -> Any:
    """Return a model without what wraps it for several devices or for compilation."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and "input_ids" not in options_of(type(model).forward):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def innermost(model: Any) -> Any:
    """Return a model without any wrapper, that of its adapters (PEFT) included: its `forward` names its options."""
    model = unwrapped(model)
    return unwrapped(model.get_base_model()) if hasattr(model, "get_base_model") else model


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Disable the adapters of a model inside: of PEFT's wrapper, or those that a model of Hugging Face was given."""
    inner = unwrapped(model)
    if hasattr(inner, "disable_adapter"):
        with inner.disable_adapter():
            yield
        return
    inner.disable_adapters()
    try:
        yield
    finally:
        inner.enable_adapters()


@cache
def options_of(forward: Any) -> frozenset[str]:
    """Return the names of what a function takes."""
    return frozenset(inspect.signature(forward).parameters)


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return ids (N, P) padded on the left, and the mask (N, P) that is true at tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return ids, mask
