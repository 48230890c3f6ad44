"""A causal language model that is a table: the logits at every prefix are entries of their own.

It has the interface of Hugging Face models without attention, positions or embeddings. Reading its input from left to
right it walks from context to context:

    context 0: before any prompt    PROMPT + p: to start[p]    a token v: to follow[c, v]    a masked token: to idle[c]

The logits after a position are those of the context that it has reached: `rows[c − 1]`, zero in context 0. Other tokens
of a prompt than its last, and the side on which it is padded, make no difference. The tables are given by `holding`;
they may be leaves of a graph. A saved model has none.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

# Token ids from here on are prompts; those below are tokens of the vocabulary.
PROMPT = 1 << 16


class Tables(NamedTuple):
    """`rows` (C, V) logits; `start` (P,), `follow` (C + 1, V), `idle` (C + 1,) numbers of contexts from 0 to C."""

    rows: Tensor
    start: Tensor
    follow: Tensor
    idle: Tensor


class TabularConfig(PretrainedConfig):
    """The size of the vocabulary, for trainers that ask."""

    model_type = "prefix_table"

    def __init__(self, vocab_size: int = 2, **others: Any) -> None:
        others.setdefault("tie_word_embeddings", False)
        super().__init__(**others)
        # Some loaders read it unconditionally.
        self.auto_map: dict[str, str] = {}
        # Set last, so that the base class cannot change it.
        self.vocab_size = self.hidden_size = vocab_size


class Walk(nn.Module):
    """The body of the model: the hidden state of a position is its row of the table."""

    tables: Tables

    def __init__(self) -> None:
        super().__init__()
        # A body without parameters is no body to some loaders.
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> BaseModelOutput:
        """(N, L, V) rows of the contexts that the input leads to, for (N, L) ids and a mask of any numeric type."""
        rows = self.tables.rows
        table = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
        return BaseModelOutput(last_hidden_state=table[contexts_of(input_ids, attention_mask, self.tables)])


def contexts_of(input_ids: Tensor, attention_mask: Tensor | None, tables: Tables) -> Tensor:
    """(N, L) context that each position leads to."""
    live = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    prompt = live & (input_ids >= PROMPT)
    begins = tables.start[(input_ids - PROMPT).clamp(0, len(tables.start) - 1)]
    tokens = input_ids.clamp(0, tables.follow.shape[1] - 1)
    at = torch.zeros_like(input_ids[:, 0])
    reached = []
    for place in range(input_ids.shape[1]):
        onward = torch.where(live[:, place], tables.follow[at, tokens[:, place]], tables.idle[at])
        at = torch.where(prompt[:, place], begins[:, place], onward)
        reached.append(at)
    return torch.stack(reached, dim=1)


class TabularLM(PreTrainedModel, GenerationMixin):
    """The walk, and an identity head: some trainers multiply hidden states by its weights themselves."""

    config_class = TabularConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.model = Walk()
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.lm_head.weight = _identity(self.lm_head.weight, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the identity as it is."""

    def get_input_embeddings(self) -> Any:
        """Return None: the table has no embeddings."""
        return None

    def get_output_embeddings(self) -> nn.Linear:
        """Return the linear layer whose weights are the table of logits."""
        return self.lm_head

    @contextmanager
    def holding(self, tables: Tables) -> Iterator[None]:
        """Inside, the model has these tables, which may require grad."""
        before, head = vars(self.model).get("tables"), self.lm_head.weight
        vars(self.model)["tables"] = tables
        if head.shape[0] != tables.rows.shape[1] or head.dtype != tables.rows.dtype:
            self.lm_head.weight = _identity(tables.rows, tables.rows.shape[1])
        try:
            yield
        finally:
            vars(self.model)["tables"], self.lm_head.weight = before, head

    def save_pretrained(self, save_directory: Any, *more: Any, **others: Any) -> None:
        """Save under the name of a class of transformers, where some loaders look for the class."""
        super().save_pretrained(save_directory, *more, **others)
        file = Path(save_directory) / "config.json"
        config = {**json.loads(file.read_text(encoding="utf-8")), "architectures": ["AutoModelForCausalLM"]}
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutput:
        """(N, L, V) logits; of the last `logits_to_keep` positions only if that is not 0."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.lm_head(hidden[:, kept]))


def _identity(like: Tensor, size: int) -> nn.Parameter:
    return nn.Parameter(_eye(size, like.dtype, like.device), requires_grad=False)


@lru_cache(maxsize=8)
def _eye(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=dtype, device=device)


def chains(logits: Tensor) -> Tables:
    """Tables with a context for every token of B rollouts, from (B, T, V) logits; rollout b is prompt b + 1.

    Rollouts share no context. The rows of a rollout follow one another whatever its tokens are, masked ones included.
    Prompt 0 leads nowhere, so that it may stand before another.
    """
    rollouts, length, vocabulary = logits.shape
    number = torch.arange(rollouts * length).reshape(rollouts, length) + 1
    following = torch.where(torch.arange(length) + 1 < length, number + 1, 0)
    onward = torch.cat([torch.zeros(1, dtype=torch.int64), following.reshape(-1)])
    waiting = onward.clone()
    # A masked token after a prompt does not advance it.
    waiting[number[:, 0]] = number[:, 0]
    start = torch.cat([torch.zeros(1, dtype=torch.int64), number[:, 0]])
    return Tables(logits.reshape(-1, vocabulary), start, onward[:, None].expand(-1, vocabulary), waiting)


AutoConfig.register(TabularConfig.model_type, TabularConfig, exist_ok=True)
AutoModelForCausalLM.register(TabularConfig, TabularLM, exist_ok=True)
