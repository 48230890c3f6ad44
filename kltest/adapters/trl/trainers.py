"""Trainers of TRL, built as a user builds them, with a table as the model and given rollouts as what it generates."""

import dataclasses
import importlib
import json
import logging
import re
import tempfile
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kltest.errors import UsageError
from kltest.loss.global_state import preserved

# Words of the tokenizer: tokens of the environments, and as many prompts as a batch may have rollouts.
TOKENS, PROMPTS = 64, 8192
# Prompts have one, two and three tokens in turn.
LENGTHS = 3
RECIPES = "kltest.adapters.trl.recipes"


def trainer_with(kind: str, beta: float, settings: dict[str, Any], recipe: str | None = None) -> Any:
    """Return `GRPOTrainer` or `RLOOTrainer`, or a recipe's class, with these settings; it is built once.

    Raises:
        UsageError: its configuration does not have a setting; argument and version are named.
    """
    fields = dataclasses.fields(class_of(f"{kind}Config")) if settings else ()
    known = {field.name for field in fields if field.init}
    for name in settings:
        if name not in known:
            raise UsageError(f"{kind}Config of TRL {version()} has no argument {name!r}, which this setting is about")
    return _built(kind, float(beta), json.dumps(settings, sort_keys=True), recipe)


@lru_cache(maxsize=64)
def _built(kind: str, beta: float, settings: str, recipe: str | None) -> Any:
    for dtype in (torch.float64, torch.float32):
        trainer = _built_in(kind, beta, json.loads(settings), recipe, dtype)
        try:
            with quietly():
                _try(trainer)
            break
        except RuntimeError:
            # The kernels of some versions have no float64.
            if dtype == torch.float32:
                raise
    return trainer


def _built_in(kind: str, beta: float, settings: dict[str, Any], recipe: str | None, dtype: torch.dtype) -> Any:
    trainer = class_of(recipe, RECIPES) if recipe else class_of(f"{kind}Trainer")
    dataset = class_of("Dataset", "datasets").from_list([{"prompt": "p1", "reward": 0.0}] * 2)
    usual = {"output_dir": f"{folder().name}/out", "report_to": "none", "use_cpu": True, "bf16": False}
    with quietly():
        model = class_of("AutoModelForCausalLM", "transformers").from_pretrained(saved_model(dtype)).to(dtype)
        try:
            built = trainer(
                model=model,
                reward_funcs=reward_given,
                args=class_of(f"{kind}Config")(**usual, beta=beta, **settings),
                train_dataset=dataset,
                processing_class=tokenizer(),
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"TRL {version()} does not take these settings: {error}") from error
    built.current_gradient_accumulation_steps = 1
    if hasattr(built, "_generate_single_turn"):
        built._generate_single_turn = lambda prompts, *_, **__: _turn(built, kind, prompts)
    else:
        built.model.generate = lambda input_ids, **_: _generated(built, input_ids)
    built.dtype_of_tables = dtype
    names = ("_get_per_token_logps_and_entropies", "_get_per_token_logps")
    built.name_of_forward = next(name for name in names if hasattr(built, name))
    return built


def _turn(trainer: Any, kind: str, prompts: Any) -> Any:
    """Return what `_generate_single_turn` does, with the rollouts as completions; releases differ in what that is."""
    release = tuple(int(number) for number in re.findall(r"\d+", version())[:2])
    parts = [trainer.rollouts]
    if release < (0, 29):
        parts.insert(0, [trainer.processing_class(prompt)["input_ids"] for prompt in prompts])
    if kind == "GRPO":
        # Only an inference engine gives log-probs of completions.
        parts.append(None)
    if release < ((1, 0) if kind == "GRPO" else (0, 25)):
        # Further inputs of the model.
        parts.append({})
    return parts[0] if len(parts) == 1 else tuple(parts)


class _Last:
    """Stands for the id of the token that ends a rollout: equal to the last live token of each row, whatever it is."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __eq__(self, tokens: Any) -> Any:
        return torch.arange(tokens.shape[1]) == self.lengths[:, None] - 1

    __hash__ = object.__hash__


def _generated(trainer: Any, prompts: Tensor) -> Tensor:
    """Return prompts and rollouts in one, as models do; early versions find the end of a rollout by its last token."""
    lengths = torch.tensor([len(row) for row in trainer.rollouts])
    padded = torch.zeros(len(lengths), max(int(lengths.max()), 1), dtype=prompts.dtype)
    for row, tokens in enumerate(trainer.rollouts):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    trainer.eos_token_id = _Last(lengths)
    return torch.cat([prompts, padded], dim=1)


def _try(trainer: Any) -> None:
    """Score and differentiate one group, which shows what the trainer gives its loss and if its dtype works."""
    size = int(trainer.args.num_generations)
    tokens = torch.arange(size)[:, None] % 2
    table = torch.zeros(size, 1, 2, dtype=torch.float64).requires_grad_()
    with in_mode(trainer, False), torch.enable_grad(), held(trainer, trainer.ref_model, table):
        with held(trainer, trainer.model, table):
            inputs = scored(trainer, tokens, torch.ones(size, 1), torch.arange(size) % 2.0, torch.arange(size))
        trainer.names_of_inputs = frozenset(name for name, value in inputs.items() if value is not None)
        trainer.absent_inputs = {name: None for name, value in inputs.items() if value is None}
        # Log-probs and entropies, in some versions an auxiliary loss as well.
        trainer.results_of_forward = len(forward(trainer, trainer.model, inputs, table))
        loss, _ = loss_of(trainer, inputs, table)
        torch.autograd.grad(loss, [table], allow_unused=True)


def scored(trainer: Any, tokens: Tensor, mask: Tensor, reward: Tensor, order: Tensor) -> dict[str, Any]:
    """Return the inputs that a trainer makes of rollouts, rows in `order`: rewards, advantages, log-probs."""
    trainer.rollouts = [tokens[row][mask[row] != 0].tolist() for row in order]
    examples = [
        {"prompt": " ".join(["p0"] * (int(row) % LENGTHS) + [f"p{int(row) + 1}"]), "reward": float(reward[row])}
        for row in order
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer._generate_and_score_completions(examples)


def forward(trainer: Any, model: Any, inputs: dict[str, Any], logits: Tensor) -> tuple[Any, ...]:
    """Return log-probs (B, T) of the completions under a table, and what else the trainer's own method returns."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with held(trainer, model, logits):
        passed = getattr(trainer, trainer.name_of_forward)(model, ids, mask, inputs["completion_ids"].shape[1])
    return passed if isinstance(passed, tuple) else (passed,)


def loss_of(trainer: Any, inputs: dict[str, Any], logits: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """Return the trainer's loss and the KL that it logs; without logits its forward pass has been replaced."""
    with nullcontext() if logits is None else held(trainer, trainer.model, logits):
        loss = trainer._compute_loss(trainer.model, inputs)
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    metrics = {"kl": logged["kl"][-1]} if logged.get("kl") else {}
    logged.clear()
    return loss, metrics


def held(trainer: Any, model: Any, logits: Tensor) -> Any:
    """Inside, the model, if there is one, is a table with these log-probs at the temperature of generation."""
    from kltest.adapters.tabular import chains

    if model is None:
        return nullcontext()
    temperature = sampled_at(trainer)
    rows = logits.to(trainer.dtype_of_tables)
    return model.holding(chains(rows if temperature == 1 else rows * temperature))


def sampled_at(trainer: Any) -> float:
    """Return the temperature of generation."""
    given = getattr(getattr(trainer, "generation_config", None), "temperature", None)
    return float(trainer.temperature if given is None else given)


@contextmanager
def in_mode(trainer: Any, evaluation: bool) -> Any:
    """Training or evaluation mode, without metrics of earlier calls."""
    trainer.model.train(not evaluation)
    for metrics in trainer._metrics.values():
        metrics.clear()
    try:
        yield
    finally:
        trainer.model.train()


@contextmanager
def quietly() -> Any:
    """Silence, and random states that are restored: building a trainer seeds all generators."""
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    silent = logging.root.manager.disable
    with warnings.catch_warnings(), preserved(), ExitStack() as unwatched:
        # A model is built on the device "meta" first, which function modes that follow each step cannot handle.
        for _ in range(torch._C._len_torch_function_stack()):
            unwatched.enter_context(torch.overrides._pop_mode_temporarily())
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(silent)


def reward_given(prompts: Any = None, completions: Any = None, reward: Any = None, **others: Any) -> Any:
    """Reward function of a trainer: the column `reward` of its data."""
    return reward


@lru_cache(maxsize=1)
def folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for models and trainers, removed when Python exits."""
    return tempfile.TemporaryDirectory(prefix="tables-")


@lru_cache(maxsize=2)
def saved_model(dtype: torch.dtype) -> str:
    """Return a folder with a tabular model, from which trainers reload their reference."""
    from kltest.adapters.tabular import TabularConfig, TabularLM

    path = f"{folder().name}/{dtype}"
    with quietly():
        model: Any = TabularLM(TabularConfig())
        model.to(dtype).save_pretrained(path)
    return path


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """Return a tokenizer whose words are the tokens of the environments and the prompts."""
    from kltest.adapters.tabular import PROMPT

    library = importlib.import_module("tokenizers")
    words = {f"t{token}": token for token in range(TOKENS)} | {f"p{row}": PROMPT + row for row in range(PROMPTS)}
    model = library.Tokenizer(library.models.WordLevel(words, unk_token="t0"))
    model.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    fast = class_of("PreTrainedTokenizerFast", "transformers")
    # Masks mark the padding, so it may be any token: 0 exists in every environment.
    return fast(tokenizer_object=model, pad_token="t0", eos_token=f"t{TOKENS - 1}", unk_token="t0", padding_side="left")


def class_of(name: str, module: str = "trl") -> Any:
    """Return a class of TRL or of another module; UsageError if this version does not have it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the installed {module} has no {name} that can be used here: {error}") from error


def version() -> str:
    """Return the installed version of TRL."""
    return str(getattr(importlib.import_module("trl"), "__version__", "of unknown version"))
