"""Calls of whole TRL trainers, built as a user builds them, with a table as the model.

`grpo` gives `_compute_loss` the inputs that `GRPOTrainer._generate_and_score_completions` would. `grouped` lets the
trainer make them itself, rewards, advantages and reference included; only generation is replaced, by the rollouts. Both
then run the real forward pass. `grpo_from_logprobs` replaces that pass by a leaf of log-probs.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import warnings
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kltest.adapters.installed import costly
from kltest.adapters.trl.parts import (
    class_of,
    folder,
    quietly,
    returned_values,
    reward_given,
    saved_model,
    tokenizer,
    version,
)
from kltest.errors import UsageError

# Prompts have one, two and three tokens in turn.
LENGTHS = 3
RECIPES = "kltest.adapters.trl.recipes"


def grpo(
    logits,
    ref_logits,
    old_logp,
    old_logits,
    tokens,
    mask,
    advantages,
    beta,
    *,
    evaluation=False,
    recipe=None,
    **settings,
):
    """`GRPOTrainer._compute_loss` on given rollouts, and the KL that it logs; `settings` are those of GRPOConfig.

    The sampler's log-probs are among the inputs if the trainer itself would pass them. Rollouts count as drawn at the
    temperature at which the trainer generates. Raises UsageError for settings that this version does not have.
    """
    trainer = trainer_with("GRPO", beta, settings, recipe=recipe)
    with _mode(trainer, evaluation):
        inputs = _inputs(trainer, tokens, mask, advantages)
        with torch.no_grad():
            if "ref_per_token_logps" in trainer.kltest_names:
                inputs["ref_per_token_logps"] = _log_probs(trainer, trainer.ref_model, inputs, ref_logits)
            if "old_per_token_logps" in trainer.kltest_names:
                # Padded positions hold what the trainer's own forward pass leaves there.
                scored = _log_probs(trainer, trainer.model, inputs, old_logits)
                inputs["old_per_token_logps"] = _of_sampler(trainer, old_logp).where(mask != 0, scored)
        return _loss(trainer, inputs, logits)


def grpo_from_logprobs(logp, ref_logp, old_logp, tokens, mask, advantages, beta, *, evaluation=False, **settings):
    """`grpo` with the forward pass replaced by log-probs; some versions compute those in float32 only."""
    trainer = trainer_with("GRPO", beta, settings)
    with _mode(trainer, evaluation), _in_place_of_the_forward_pass(trainer, logp):
        inputs = _inputs(trainer, tokens, mask, advantages)
        given = {"ref_per_token_logps": ref_logp, "old_per_token_logps": old_logp}
        inputs.update({name: value.detach() for name, value in given.items() if name in trainer.kltest_names})
        return _loss(trainer, inputs, None)


def grouped(
    logits,
    ref_logits,
    old_logits,
    tokens,
    mask,
    reward,
    group,
    beta,
    *,
    trainer,
    evaluation=False,
    recipe=None,
    **settings,
):
    """`_generate_and_score_completions` and `_compute_loss` of `trainer` ("GRPO", "RLOO") on whole groups of a prompt.

    The model holds the sampler's table while it scores, and the policy's table when the loss is computed.
    """
    order = torch.argsort(group, stable=True)
    sizes = set(torch.unique(group, return_counts=True)[1].tolist())
    if len(sizes) != 1:
        raise UsageError(f"TRL takes groups of one size; these have {sorted(sizes)} rollouts")
    (size,) = sizes
    if size < 2 and not evaluation:
        raise UsageError("TRL trains on groups of at least two rollouts of a prompt; this one has one")
    name = "num_generations_eval" if evaluation else "num_generations"
    batch = {} if evaluation else {"per_device_train_batch_size": size}
    built = trainer_with(trainer, beta, {name: size, **settings}, batch, recipe=recipe)
    with _mode(built, evaluation), _held(built, built.ref_model, ref_logits):
        with _held(built, built.model, old_logits):
            inputs = _scored(built, tokens, mask, reward, order)
        return _loss(built, inputs, logits)


def trainer_with(kind, beta, settings, usual=None, *, recipe=None):
    """A trainer of TRL with these settings, built once; `usual` settings are left out if this version lacks them.

    Raises UsageError, naming argument and version, for a setting that its configuration does not have.
    """
    known = {field.name for field in dataclasses.fields(class_of(f"{kind}Config")) if field.init}
    for name in settings:
        if name not in known:
            raise UsageError(f"{kind}Config of TRL {version()} has no argument {name!r}, which this setting is about")
    passed = {name: value for name, value in (usual or {}).items() if name in known}
    return _built(kind, float(beta), json.dumps({**passed, **settings}, sort_keys=True), recipe)


@lru_cache(maxsize=64)
def _built(kind: str, beta: float, settings: str, recipe: str | None) -> Any:
    for dtype in (torch.float64, torch.float32):
        trainer = _built_in(kind, beta, json.loads(settings), recipe, dtype)
        try:
            with quietly():
                _tried(trainer)
        except RuntimeError:
            # The kernels of some versions have no float64.
            if dtype == torch.float32:
                raise
            continue
        return trainer
    raise AssertionError


def _built_in(kind: str, beta: float, settings: dict[str, Any], recipe: str | None, dtype: torch.dtype) -> Any:
    config, trainer = class_of(f"{kind}Config"), class_of(f"{kind}Trainer")
    if recipe is not None:
        trainer = getattr(importlib.import_module(RECIPES), recipe)
    known = inspect.signature(config).parameters
    usual = {"output_dir": f"{folder()}/out", "report_to": "none", "use_cpu": True, "bf16": False, "fp16": False}
    usual = {name: value for name, value in usual.items() if name in known}
    dataset = importlib.import_module("datasets").Dataset.from_list([{"prompt": "p1", "reward": 0.0}] * 2)
    with quietly():
        model = class_of("AutoModelForCausalLM", "transformers").from_pretrained(saved_model(dtype), dtype=dtype)
        try:
            arguments = config(**{**usual, "beta": beta, **settings})
            built = trainer(
                model=model,
                reward_funcs=reward_given,
                args=arguments,
                train_dataset=dataset,
                processing_class=tokenizer(),
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"TRL {version()} does not take these settings: {error}") from error
    for name in ("_generate_single_turn", "_generate_and_score_completions", "_compute_loss"):
        if not hasattr(built, name):
            raise UsageError(f"{kind}Trainer of TRL {version()} has no {name}, through which it is graded")
    built.current_gradient_accumulation_steps = 1
    # Beside the completions generation returns their log-probs, which only an inference engine gives.
    built._generate_single_turn = lambda *_, **__: (
        built.kltest_completions if kind == "RLOO" else (built.kltest_completions, None)
    )
    built.kltest_kind, built.kltest_dtype = kind, dtype
    return built


def _tried(trainer: Any) -> None:
    """Score and differentiate one group, which shows what the trainer gives its loss and if its dtype works."""
    size = int(trainer.args.num_generations)
    tokens = torch.arange(size)[:, None] % 2
    table = torch.zeros(size, 1, 2, dtype=torch.float64).requires_grad_()
    with _mode(trainer, False), torch.enable_grad():
        with _held(trainer, trainer.ref_model, table), _held(trainer, trainer.model, table):
            inputs = _scored(trainer, tokens, torch.ones(size, 1), torch.arange(size) % 2.0, torch.arange(size))
        trainer.kltest_names = frozenset(inputs)
        loss, _ = _loss(trainer, inputs, table)
        torch.autograd.grad(loss, [table], allow_unused=True)


def _inputs(trainer: Any, tokens: Tensor, mask: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Inputs of the loss that need no model, under the names that the trainer uses."""
    from kltest.adapters.tabular import PROMPT

    rows = len(tokens)
    live = (mask != 0).long()
    number = torch.arange(rows)
    prompts = torch.full((rows, LENGTHS), PROMPT)
    prompts[:, -1] += number + 1
    of_batch = torch.arange(LENGTHS) >= LENGTHS - 1 - number[:, None] % LENGTHS
    # The count is over the whole generation batch, which holds several parts like this one.
    items = live.sum() * int(getattr(trainer.args, "steps_per_generation", 1) or 1)
    return {
        "prompt_ids": torch.where(of_batch, prompts, 0),
        "prompt_mask": of_batch.long(),
        "completion_ids": tokens,
        "completion_mask": live,
        "advantages": advantages.detach(),
        "num_items_in_batch": items,
    }


def _log_probs(trainer: Any, model: Any, inputs: dict[str, Tensor], logits: Tensor) -> Tensor:
    """(B, T) log-probs of the completions under a table, by the trainer's own method."""
    with _held(trainer, model, logits):
        scored = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
        )
    return scored[0]


def _scored(trainer: Any, tokens: Tensor, mask: Tensor, reward: Tensor, order: Tensor) -> dict[str, Any]:
    """Inputs that the trainer itself makes of rollouts, rows in the given order: rewards, advantages, log-probs."""
    trainer.kltest_completions = [tokens[row][mask[row] != 0].tolist() for row in order]
    examples = [
        {"prompt": " ".join(["p0"] * (int(row) % LENGTHS) + [f"p{int(row) + 1}"]), "reward": float(reward[row])}
        for row in order
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer._generate_and_score_completions(examples)


def _of_sampler(trainer: Any, old_logp: Tensor) -> Tensor:
    if _sampled_at(trainer) != trainer.temperature:
        raise UsageError("log-probs under the sampler are those at the trainer's temperature; generate at that one")
    return old_logp.detach().to(trainer.kltest_dtype)


def _loss(trainer: Any, inputs: dict[str, Any], logits: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    mode = "train" if trainer.model.training else "eval"
    with ExitStack() as stack:
        if logits is not None:
            stack.enter_context(_held(trainer, trainer.model, logits))
        loss = trainer._compute_loss(trainer.model, inputs)
    logged = trainer._metrics[mode].get("kl")
    metrics = {"kl": logged[-1]} if logged else {}
    trainer._metrics[mode].clear()
    return loss, metrics


def _held(trainer: Any, model: Any, logits: Tensor) -> Any:
    """Inside, the model is a table with these log-probs at the temperature of generation."""
    from kltest.adapters.tabular import chains

    stack = ExitStack()
    if model is not None:
        temperature = _sampled_at(trainer)
        rows = logits.to(trainer.kltest_dtype)
        stack.enter_context(model.holding(chains(rows if temperature == 1 else rows * temperature)))
    return stack


def _sampled_at(trainer: Any) -> float:
    given = getattr(getattr(trainer, "generation_config", None), "temperature", None)
    return float(trainer.temperature if given is None else given)


@contextmanager
def _mode(trainer: Any, evaluation: bool) -> Any:
    """Training or evaluation mode, without metrics of earlier calls."""
    trainer.model.train(not evaluation)
    for metrics in trainer._metrics.values():
        metrics.clear()
    try:
        yield
    finally:
        trainer.model.train()


@contextmanager
def _in_place_of_the_forward_pass(trainer: Any, logp: Tensor) -> Any:
    def scored(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return logp, torch.zeros_like(logp.detach()), None

    home = type(trainer)._get_per_token_logps_and_entropies
    parts = returned_values(home)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored()[:parts]
    try:
        yield
    finally:
        del trainer._get_per_token_logps_and_entropies


costly(grpo, grouped)
