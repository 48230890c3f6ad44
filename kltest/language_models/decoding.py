"""Generation with a key-value cache of fixed size: its steps are alike, so that they can be compiled."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kltest.errors import UsageError
from kltest.language_models.language import LanguageModel, options_of

# Caches have a multiple of this many positions: steps of other sizes are compiled anew.
POSITIONS = 128


class Decoder:
    """The model as it generates: with the weights of a language model as they are at each start.

    Raises:
        UsageError: The model's cache cannot have a fixed size.
    """

    def __init__(self, language: LanguageModel, compiled: Callable[[Any], Any]) -> None:
        self.source = language
        # Casts of weights would be made at every step: without gradients, they are made at the start.
        self.language = language if language.compute_dtype is None else language.frozen()
        model: Any = self.language.model
        if not (language.caches and getattr(model, "_can_compile_fullgraph", False)):
            name = type(model).__name__
            raise UsageError(f"static_cache: the cache of {name} cannot have a fixed size; set static_cache=false")
        self.cache: Any = None
        self.step_of_model, self.shape = compiled(model), torch.Size()

    def start(self, ids: Tensor, mask: Tensor, longest: int) -> Tensor:
        """Read prompts (B, P), true in `mask`, and return the logits (B, V) of the first of `longest` tokens."""
        if self.language is not self.source:
            for own, now in zip(self.language.model.parameters(), self.source.model.parameters(), strict=True):
                own.copy_(now)
        rows, more = len(ids), -(-(ids.shape[1] + longest) // POSITIONS) * POSITIONS - ids.shape[1]
        # Tokens still to come are live: that they are later hides them.
        self.mask = torch.cat([mask, mask.new_ones(rows, more)], dim=1).long()
        self.positions, self.read = self.mask.cumsum(dim=1).sub_(1).clamp_(min=0), 0
        if self.shape == self.mask.shape:
            self.cache.reset()
        else:
            self.shape = self.mask.shape
            self.cache = _static_cache()(config=self.language.model.config, max_cache_len=self.shape[1])
        return self._read(self.language.model, ids)

    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token (B,) of each row and return the logits (B, V) of the next."""
        return self._read(self.step_of_model, tokens[:, None])

    def _read(self, model: Any, ids: Tensor) -> Tensor:
        before, self.read = self.read, self.read + ids.shape[1]
        options = {
            "attention_mask": self.mask,
            "position_ids": self.positions[:, before : self.read],
            "past_key_values": self.cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        accepted = options_of(type(self.language.model).forward)
        with self.language.autocast():
            answer = model(input_ids=ids, **{name: value for name, value in options.items() if name in accepted})
        return answer.logits[:, -1]


@cache
def _static_cache() -> Any:
    from transformers import StaticCache

    class Cache(StaticCache):
        """Keys have the dtype of values: under autocast they often come in a higher one, which attention lowers."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)

    return Cache
