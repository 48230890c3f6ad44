"""One token more for every rollout: by the model's own forward pass, or, for a Llama, by the same arithmetic unwrapped.

At small sizes a forward pass of one token costs what calling its modules costs. `LlamaDecoder` calls nothing but the
arithmetic, with the weights of a layer's projections joined and a cache that is written in place. In a lower precision
weights are cast once for a whole generation.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from kltest.language_models.language import Language


class Decoder(Protocol):
    """What has seen prompts and goes on from there."""

    def next(self, token: Tensor) -> Tensor:
        """(B, V) next-token logits after one token (B,) more."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        ...


def decoder(language: Language, cache: Any, seen: Tensor | None, prompt: int, longest: int) -> Decoder:
    """The fastest for this model. `cache` holds `prompt` positions of B rows; `seen` (B, P) is true at tokens."""
    kind = LlamaDecoder if _is_plain_llama(language.model) else CachedDecoder
    return kind(language, cache, seen, prompt, longest)


class CachedDecoder:
    """The model's own forward pass with its own cache."""

    def __init__(self, language: Language, cache: Any, seen: Tensor | None, prompt: int, longest: int) -> None:
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
    """transformers' LlamaForCausalLM of one token, written out."""

    def __init__(self, language: Language, cache: Any, seen: Tensor | None, prompt: int, longest: int) -> None:
        whole: Any = language.model
        model, config = whole.model, whole.config
        self.type = language.passes or next(language.model.parameters()).dtype
        self.norms = [(layer.input_layernorm.weight, layer.post_attention_layernorm.weight) for layer in model.layers]
        self.weights = [tuple(part.to(self.type) for part in _joined(layer)) for layer in model.layers]
        self.embedding, self.last_norm = model.embed_tokens.weight, model.norm.weight
        self.head = whole.lm_head.weight.to(self.type)
        self.epsilon = config.rms_norm_eps
        self.queries, self.keys = config.num_attention_heads, config.num_key_value_heads
        self.position = prompt
        self.stored = [_room(layer, longest, self.type) for layer in cache.layers]
        rows = self.stored[0][0].shape[0]
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
        self.stored = [(keys[rows], values[rows]) for keys, values in self.stored]
        if self.mask is not None:
            self.mask, self.cosine, self.sine = self.mask[rows], self.cosine[rows], self.sine[rows]

    def next(self, token: Tensor) -> Tensor:
        step, end = self.position - self.start, self.position + 1
        cosine, sine = self.cosine[:, step], self.sine[:, step]
        mask = None if self.mask is None else self.mask[..., :end]
        x, rows = embedding(token, self.embedding), len(token)
        width = (x.shape[1],)
        for norms, weights, (keys, values) in zip(self.norms, self.weights, self.stored, strict=True):
            attend, output, widen, narrow = weights
            projected = linear(rms_norm(x, width, norms[0], self.epsilon).to(self.type), attend)
            projected = projected.view(rows, self.queries + 2 * self.keys, -1)
            turned = projected[:, : self.queries + self.keys]
            turned = (turned * cosine + turned.roll(self.half, -1) * sine).to(self.type)
            keys[:, :, self.position] = turned[:, self.queries :]
            values[:, :, self.position] = projected[:, self.queries + self.keys :]
            mixed = scaled_dot_product_attention(
                turned[:, : self.queries, None],
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=mask,
                enable_gqa=self.queries != self.keys,
            )
            x = x + linear(mixed.reshape(rows, -1), output)
            gate, up = linear(rms_norm(x, width, norms[1], self.epsilon).to(self.type), widen).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, narrow)
        self.position = end
        return linear(rms_norm(x, width, self.last_norm, self.epsilon).to(self.type), self.head)


def _is_plain_llama(model: Any) -> bool:
    """Whether it is what LlamaDecoder writes out: no subclass, no biases, no adapters, one activation."""
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


def _room(layer: Any, longest: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """A layer's keys and values with room for all that comes."""
    keys, values = (torch.nn.functional.pad(part.to(kind), (0, 0, 0, longest)) for part in (layer.keys, layer.values))
    return keys, values
