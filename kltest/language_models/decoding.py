"""Decoding of one more token for every rollout: by the model's own forward pass, or by a faster one for Llamas.

Kept because transformers' own caches take 1.36 (DynamicCache) to 1.46 times (StaticCache) as long at 0.6 million
parameters on one thread, and `model.generate` 1.8 times: at small sizes a pass of one token costs what calling its
modules costs. `LlamaDecoder` does the arithmetic alone, with the weights of a layer's projections joined and a cache
that is written in place. In a lower precision, weights are cast once for a whole generation.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from kltest.language_models.language import LanguageModel


class Decoder(Protocol):
    """A generation in progress, after its prompts."""

    def next(self, token: Tensor) -> Tensor:
        """Return (B, V) next-token logits after one more token (B,)."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        ...


def decoder(language: LanguageModel, cache: Any, seen: Tensor | None, prompt: int, longest: int) -> Decoder:
    """Return the fastest decoder for this model; `cache` holds `prompt` positions, `seen` (B, P) is true at tokens."""
    kind = LlamaDecoder if _is_plain_llama(language.model) else CachedDecoder
    return kind(language, cache, seen, prompt, longest)


class CachedDecoder:
    """Decoding by the model's own forward pass and cache."""

    def __init__(self, language: LanguageModel, cache: Any, seen: Tensor | None, prompt: int, longest: int) -> None:
        self.language, self.cache, self.seen = language, cache, seen

    def next(self, token: Tensor) -> Tensor:
        if self.seen is not None:
            self.seen = torch.cat([self.seen, self.seen.new_ones(len(token), 1)], dim=1)
        logits, self.cache = self.language.forward(token[:, None], self.seen, keep=1, cache=self.cache)
        return logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.seen = None if self.seen is None else self.seen[rows]


class LlamaDecoder:
    """Decoding by the forward pass of transformers' LlamaForCausalLM, written out for one token."""

    def __init__(self, language: LanguageModel, cache: Any, seen: Tensor | None, prompt: int, longest: int) -> None:
        whole: Any = language.model
        model, config = whole.model, whole.config
        self.dtype = language.compute_dtype or next(language.model.parameters()).dtype
        self.norms = [(layer.input_layernorm.weight, layer.post_attention_layernorm.weight) for layer in model.layers]
        self.weights = [tuple(part.to(self.dtype) for part in _joined(layer)) for layer in model.layers]
        self.embedding, self.last_norm = model.embed_tokens.weight, model.norm.weight
        self.head = whole.lm_head.weight.to(self.dtype)
        self.epsilon = config.rms_norm_eps
        self.queries, self.keys = config.num_attention_heads, config.num_key_value_heads
        self.position = prompt
        self.cache = [_preallocated(layer, longest, self.dtype) for layer in cache.layers]
        rows = self.cache[0][0].shape[0]
        self.mask = None
        positions = torch.arange(prompt, prompt + longest, device=self.embedding.device)[None]
        if seen is not None:
            self.mask = torch.cat([seen, seen.new_ones(rows, longest)], dim=1)[:, None, None]
            positions = positions - (~seen).sum(dim=1, keepdim=True)
        cosine, sine = model.rotary_emb(self.embedding, positions)
        half = sine.shape[-1] // 2
        self.cosine = cosine[:, :, None]
        self.sine = torch.cat([-sine[..., :half], sine[..., half:]], dim=-1)[:, :, None]
        self.half, self.start = half, prompt

    def keep(self, rows: Tensor) -> None:
        self.cache = [(keys[rows], values[rows]) for keys, values in self.cache]
        if self.mask is not None:
            self.mask, self.cosine, self.sine = self.mask[rows], self.cosine[rows], self.sine[rows]

    def next(self, token: Tensor) -> Tensor:
        step, end = self.position - self.start, self.position + 1
        cosine, sine = self.cosine[:, step], self.sine[:, step]
        mask = None if self.mask is None else self.mask[..., :end]
        x, rows = embedding(token, self.embedding), len(token)  # (B, D)
        width = (x.shape[1],)
        for norms, weights, (keys, values) in zip(self.norms, self.weights, self.cache, strict=True):
            attend, output, widen, narrow = weights
            projected = linear(rms_norm(x, width, norms[0], self.epsilon).to(self.dtype), attend)
            projected = projected.view(rows, self.queries + 2 * self.keys, -1)  # (B, heads, width of a head)
            # Rotary positions: the sine already has the signs of a rotation by halves.
            turned = projected[:, : self.queries + self.keys]
            turned = (turned * cosine + turned.roll(self.half, -1) * sine).to(self.dtype)
            keys[:, :, self.position] = turned[:, self.queries :]
            values[:, :, self.position] = projected[:, self.queries + self.keys :]
            mixed = scaled_dot_product_attention(
                turned[:, : self.queries, None],
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=mask,
                enable_gqa=self.queries != self.keys,
            )  # (B, heads, 1, width of a head)
            x = x + linear(mixed.reshape(rows, -1), output)
            gate, up = linear(rms_norm(x, width, norms[1], self.epsilon).to(self.dtype), widen).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, narrow)
        self.position = end
        return linear(rms_norm(x, width, self.last_norm, self.epsilon).to(self.dtype), self.head)


def _is_plain_llama(model: Any) -> bool:
    """True for a model that LlamaDecoder writes out: no subclass, no biases, no adapters, SiLU."""
    config = model.config
    return (
        type(model).__name__ == "LlamaForCausalLM"
        and type(model).__module__ == "transformers.models.llama.modeling_llama"
        and not (config.attention_bias or config.mlp_bias)
        and config.hidden_act == "silu"
        and all(
            type(part) is torch.nn.Linear
            for layer in model.model.layers
            for part in (*layer.self_attn.children(), *list(layer.mlp.children())[:3])
        )
    )


def _joined(layer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    attention, perceptron = layer.self_attn, layer.mlp
    return (
        torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        attention.o_proj.weight,
        torch.cat([perceptron.gate_proj.weight, perceptron.up_proj.weight]),
        perceptron.down_proj.weight,
    )


def _preallocated(layer: Any, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, with space for `longest` more positions."""
    keys, values = (torch.nn.functional.pad(part.to(dtype), (0, 0, 0, longest)) for part in (layer.keys, layer.values))
    return keys, values
