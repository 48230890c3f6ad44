from __future__ import annotations
"""A causal language model that is a table: the logits at every prefix are entries of their own, whatever the padding.

It has the interface of Hugging Face models, and nothing else: no attention, no positions, no embeddings. Reading its
input from left to right it walks from prefix to prefix,

    context 0: before any prompt    PROMPT + p: to start[p]    a token v: to follow[c, v]    a masked token: to idle[c],

and the logits after a position are those of the context that it has reached: `rows[c − 1]`, zero in context 0. What
tokens a prompt has beside its last one, and on which side it is padded, makes no difference.

The tables may be parameters (saved, loaded, trained like any others), or tensors that are put in their place for a
while (`holding`), as the leaves of somebody else's graph.
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

PROMPT = 1 << 16
"""Token ids from here on are prompts; those below are tokens of the vocabulary."""


class Tables(NamedTuple):
    """`rows` (C, V) logits; `start` (P,), `follow` (C + 1, V) and `idle` (C + 1,) numbers of contexts, 1 … C, or 0."""

    rows: Tensor
    start: Tensor
    follow: Tensor
    idle: Tensor


class TabularConfig(PretrainedConfig):
    """Sizes of the table: V = `vocab_size`, C = `contexts`, P = `prompts`."""

    model_type = "prefix_table"

    def __init__(self, vocab_size: int = 2, contexts: int = 1, prompts: int = 1, **others: Any) -> None:
        self.contexts = contexts
        self.prompts = prompts
        others.setdefault("tie_word_embeddings", False)
        super().__init__(**others)
        # Some loaders read it without asking whether it is there.
        self.auto_map: dict[str, str] = {}
        # There is nothing to remember between tokens; what generates asks for the number of layers all the same.
        self.num_hidden_layers, self.use_cache = 1, False
        # Set last: what a base class does with names of its own must not undo it.
        self.vocab_size = vocab_size
        self.hidden_size = vocab_size


class Walk(nn.Module):
    """What comes before the head: the "hidden state" of a position is its row of the table."""

    def __init__(self, config: TabularConfig) -> None:
        super().__init__()
        contexts, vocabulary = config.contexts, config.vocab_size
        self.rows = nn.Parameter(torch.zeros(contexts, vocabulary))
        # Floating-point buffers would follow the model's type; numbers of contexts do not.
        self.register_buffer("start", torch.zeros(config.prompts, dtype=torch.int64))
        self.register_buffer("follow", torch.zeros(contexts + 1, vocabulary, dtype=torch.int64))
        self.register_buffer("idle", torch.zeros(contexts + 1, dtype=torch.int64))
        self.held: Tables | None = None

    @property
    def tables(self) -> Tables:
        return self.held or Tables(*(getattr(self, name) for name in Tables._fields))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> BaseModelOutput:
        """(N, L, V) rows of the contexts that the input leads to, for (N, L) ids and a mask of any numeric type."""
        tables = self.tables
        reached = contexts_of(input_ids, attention_mask, tables)
        table = torch.cat([tables.rows.new_zeros(1, tables.rows.shape[1]), tables.rows])
        return BaseModelOutput(last_hidden_state=table[reached])


def contexts_of(input_ids: Tensor, attention_mask: Tensor | None, tables: Tables) -> Tensor:
    """(N, L) the context that each position leads to."""
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
    """The walk, and a head that is the identity: some trainers multiply hidden states by its weights themselves."""

    config_class = TabularConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: TabularConfig) -> None:
        super().__init__(config)
        self.model = Walk(config)
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.lm_head.weight = _identity(self.lm_head.weight, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a table is given, not drawn."""

    def get_input_embeddings(self) -> Any:
        return None

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    @contextmanager
    def holding(self, tables: Tables) -> Iterator[None]:
        """Inside, the model is these tables, which may require grad; it says nothing of what it is outside."""
        before, head = self.model.held, self.lm_head.weight
        self.model.held = tables
        if head.shape[0] != tables.rows.shape[1] or head.dtype != tables.rows.dtype:
            self.lm_head.weight = _identity(tables.rows, tables.rows.shape[1])
        try:
            yield
        finally:
            self.model.held, self.lm_head.weight = before, head

    def set_tables(self, tables: Tables) -> TabularLM:
        """The model itself, its parameter and buffers exchanged for copies of these."""
        self.config.contexts, self.config.vocab_size = tables.rows.shape
        self.config.hidden_size, self.config.prompts = self.config.vocab_size, len(tables.start)
        self.model.rows = nn.Parameter(tables.rows.detach().clone())
        for name in ("start", "follow", "idle"):
            setattr(self.model, name, getattr(tables, name).clone())
        self.lm_head.weight = _identity(tables.rows, self.config.vocab_size)
        return self

    def save_pretrained(self, save_directory: Any, *more: Any, **others: Any) -> None:
        """As of any model, under the name of a class of transformers: some loaders look for the class there."""
        super().save_pretrained(save_directory, *more, **others)
        file = Path(save_directory) / "config.json"
        told = {**json.loads(file.read_text(encoding="utf-8")), "architectures": ["AutoModelForCausalLM"]}
        file.write_text(json.dumps(told, indent=2), encoding="utf-8")

    def prepare_inputs_for_generation(self, input_ids: Tensor, *more: Any, **others: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": others.get("attention_mask")}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        """(N, L, V) logits, of the last `logits_to_keep` positions if that is not 0."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            wanted = labels[:, 1:].reshape(-1)
            loss = nn.functional.cross_entropy(logits[:, :-1].reshape(len(wanted), -1), wanted, ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)


def _identity(like: Tensor, size: int) -> nn.Parameter:
    return nn.Parameter(_eye(size, like.dtype, like.device), requires_grad=False)


@lru_cache(maxsize=8)
def _eye(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=dtype, device=device)


def chains(logits: Tensor) -> Tables:
    """Tables of a context for every token of B rollouts, (B, T, V): rollout b is prompt b + 1, and shares no context.

    Which tokens it has makes no difference, nor do masked tokens once it has begun: its rows come one after another,
    and what a caller keeps at dead positions stays there. Prompt 0 leads nowhere: it may stand before another.
    """
    rollouts, length, vocabulary = logits.shape
    number = torch.arange(rollouts * length).reshape(rollouts, length) + 1
    following = torch.where(torch.arange(length) + 1 < length, number + 1, 0)
    onward = torch.cat([torch.zeros(1, dtype=torch.int64), following.reshape(-1)])
    waiting = onward.clone()
    # A prompt that is padded on its right is not over yet.
    waiting[number[:, 0]] = number[:, 0]
    start = torch.cat([torch.zeros(1, dtype=torch.int64), number[:, 0]])
    return Tables(logits.reshape(-1, vocabulary), start, onward[:, None].expand(-1, vocabulary), waiting)


AutoConfig.register(TabularConfig.model_type, TabularConfig, exist_ok=True)
AutoModelForCausalLM.register(TabularConfig, TabularLM, exist_ok=True)
"""The expected gradient of a TRL trainer's KL term, by every completion of three tokens out of two, each with its
probability: one call of the trainer's own loss for a completion, or for every group of two. Only TRL and torch.
"""


import itertools
import json
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast


VOCABULARY, LENGTH = 2, 3
CONTEXTS = VOCABULARY**LENGTH - 1
COMPLETIONS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
POLICY = [[0.6, 0.4], [0.3, 0.7], [0.5, 0.5], [0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.45, 0.55]]
REFERENCE = [[0.4, 0.6], [0.5, 0.5], [0.7, 0.3], [0.6, 0.4], [0.55, 0.45], [0.5, 0.5], [0.25, 0.75]]
SAMPLER = [[0.5, 0.5], [0.4, 0.6], [0.4, 0.6], [0.7, 0.3], [0.5, 0.5], [0.6, 0.4], [0.55, 0.45]]


def tables(probabilities: list[list[float]]) -> Tables:
    """Contexts in breadth-first order, all below one prompt; number 0 is what comes before it and after the end."""
    inner = CONTEXTS // VOCABULARY
    follow = torch.zeros(CONTEXTS + 1, VOCABULARY, dtype=torch.int64)
    for context in range(inner):
        follow[context + 1] = VOCABULARY * context + 2 + torch.arange(VOCABULARY)
    rows = torch.tensor(probabilities, dtype=torch.float64).log()
    return Tables(rows, torch.tensor([0, 1]), follow, torch.arange(CONTEXTS + 1))


def trainer_with(kind: str, beta: float, settings: dict[str, Any], own_class: Any, folder: str) -> Any:
    """A trainer of TRL on the saved model, whose generation gives what is put into `completions`."""
    words = {f"t{token}": token for token in range(VOCABULARY)} | {"p0": PROMPT, "p1": PROMPT + 1}
    words_only = Tokenizer(models.WordLevel(words, unk_token="t0"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_only, pad_token="t0", eos_token="t0")
    config = getattr(trl, f"{kind}Config")(
        output_dir=folder, report_to="none", use_cpu=True, bf16=False, beta=beta, **settings
    )
    trainer = (own_class or getattr(trl, f"{kind}Trainer"))(
        model=TabularLM.from_pretrained(folder, dtype=torch.float64),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "p1"}] * 2),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer._generate_single_turn = lambda *_, **__: (
        trainer.completions
        if kind == "RLOO"
        else (
            trainer.completions,
            None,
        )
    )
    return trainer


def inputs_of(trainer: Any, completion: tuple[int, ...], stale: bool, sampler: Tables, reference: Tables) -> Any:
    """What GRPOTrainer's `_compute_loss` is given for one completion."""
    ids = {"prompt_ids": torch.tensor([[PROMPT + 1]]), "completion_ids": torch.tensor([completion])}
    live = {name.replace("ids", "mask"): torch.ones_like(value) for name, value in ids.items()}
    both = torch.cat(list(ids.values()), dim=1), torch.cat(list(live.values()), dim=1), LENGTH
    more = {
        "advantages": torch.zeros(1),
        "num_items_in_batch": torch.tensor(LENGTH * trainer.args.steps_per_generation),
    }
    with torch.no_grad():
        if trainer.ref_model is not None:
            with trainer.ref_model.holding(reference):
                scored = trainer._get_per_token_logps_and_entropies(trainer.ref_model, *both)
                more["ref_per_token_logps"] = scored[0]
        if stale:
            with trainer.model.holding(sampler):
                scored = trainer._get_per_token_logps_and_entropies(trainer.model, *both)
                more["old_per_token_logps"] = scored[0]
    return {**ids, **live, **more}


def expected(
    kind: str, settings: dict[str, Any], own_class: Any, stale: bool, evaluation: bool, grouped: bool
) -> Tensor:
    """(C, V) the part of the expected gradient that beta = 1 multiplies, with respect to logits."""
    policy, reference, sampler = map(tables, (POLICY, REFERENCE, SAMPLER if stale else POLICY))
    chance = [probability(completion, sampler) for completion in COMPLETIONS]
    rows = policy.rows.clone().requires_grad_()
    found = torch.zeros_like(policy.rows)
    size = 2 if grouped else 1
    if grouped:
        settings = {**settings, "num_generations": size, "per_device_train_batch_size": size}
    with tempfile.TemporaryDirectory() as folder:
        TabularLM(TabularConfig(VOCABULARY, CONTEXTS, 2)).double().save_pretrained(folder)
        for beta in (1.0, 0.0):
            trainer = trainer_with(kind, beta, settings, own_class, folder)
            trainer.model.train(not evaluation)
            heat = getattr(getattr(trainer, "generation_config", None), "temperature", None) or trainer.temperature
            held = policy._replace(rows=rows * heat)
            old, ref = (each._replace(rows=each.rows * heat) for each in (sampler, reference))
            for group in itertools.product(range(len(COMPLETIONS)), repeat=size):
                if grouped:
                    trainer.completions = [list(COMPLETIONS[number]) for number in group]
                    with trainer.model.holding(old):
                        if trainer.ref_model is None:
                            inputs = trainer._generate_and_score_completions([{"prompt": "p1"}] * size)
                        else:
                            with trainer.ref_model.holding(ref):
                                inputs = trainer._generate_and_score_completions([{"prompt": "p1"}] * size)
                else:
                    inputs = inputs_of(trainer, COMPLETIONS[group[0]], stale, old, ref)
                with trainer.model.holding(held):
                    loss = trainer._compute_loss(trainer.model, inputs)
                (gradient,) = torch.autograd.grad(loss, [rows], retain_graph=True, allow_unused=True)
                weight = torch.tensor([chance[number] for number in group]).prod()
                if gradient is not None:
                    found += (1 if beta else -1) * weight * gradient
    return found


def probability(completion: tuple[int, ...], model: Tables) -> float:
    context, total = 1, 0.0
    for token in completion:
        total += float(model.rows[context - 1, token])
        context = int(model.follow[context, token])
    return float(torch.tensor(total).exp())


def show(
    kind: str, settings: dict[str, Any], own_class: Any, *, stale: bool, evaluation: bool = False, grouped: bool = False
) -> None:
    """Print it with the world that it holds in, as one line of JSON."""
    found = expected(kind, settings, own_class, stale, evaluation, grouped)
    told = {"vocabulary": VOCABULARY, "length": LENGTH, "policy": POLICY, "reference": REFERENCE}
    print(json.dumps({**told, "sampler": SAMPLER if stale else None, "expected": found.tolist()}))


show('GRPO', {'loss_type': 'cispo'}, None, stale=False, evaluation=False, grouped=False)
