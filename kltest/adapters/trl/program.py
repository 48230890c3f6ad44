"""The expected gradient of a TRL trainer's KL term, with TRL and torch alone.

The trainer's own loss is called for every completion of three tokens from a vocabulary of two, or for every group of
two completions, and gradients are summed with their probabilities.
"""

from __future__ import annotations

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

from kltest.adapters.tabular import PROMPT, Tables, TabularConfig, TabularLM

VOCABULARY, LENGTH = 2, 3
CONTEXTS = VOCABULARY**LENGTH - 1
COMPLETIONS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
POLICY = [[0.6, 0.4], [0.3, 0.7], [0.5, 0.5], [0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.45, 0.55]]
REFERENCE = [[0.4, 0.6], [0.5, 0.5], [0.7, 0.3], [0.6, 0.4], [0.55, 0.45], [0.5, 0.5], [0.25, 0.75]]
SAMPLER = [[0.5, 0.5], [0.4, 0.6], [0.4, 0.6], [0.7, 0.3], [0.5, 0.5], [0.6, 0.4], [0.55, 0.45]]


def tables(probabilities: list[list[float]]) -> Tables:
    """Contexts in breadth-first order, all below one prompt; number 0 stands before the prompt and after the end."""
    inner = CONTEXTS // VOCABULARY
    follow = torch.zeros(CONTEXTS + 1, VOCABULARY, dtype=torch.int64)
    for context in range(inner):
        follow[context + 1] = VOCABULARY * context + 2 + torch.arange(VOCABULARY)
    rows = torch.tensor(probabilities, dtype=torch.float64).log()
    return Tables(rows, torch.tensor([0, 1]), follow, torch.arange(CONTEXTS + 1))


def trainer_with(kind: str, beta: float, settings: dict[str, Any], own_class: Any, folder: str) -> Any:
    """A trainer of TRL on the saved model, whose generation returns `trainer.completions`."""
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
        trainer.completions if kind == "RLOO" else (trainer.completions, None)
    )
    return trainer


def inputs_of(trainer: Any, completion: tuple[int, ...], stale: bool, sampler: Tables, reference: Tables) -> Any:
    """The inputs of GRPOTrainer's `_compute_loss` for one completion."""
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
    """(C, V) expected gradient at beta = 1 minus that at beta = 0, with respect to logits."""
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
    """Print the gradient and its environment as one line of JSON."""
    found = expected(kind, settings, own_class, stale, evaluation, grouped)
    environment = {"vocabulary": VOCABULARY, "length": LENGTH, "policy": POLICY, "reference": REFERENCE}
    print(json.dumps({**environment, "sampler": SAMPLER if stale else None, "expected": found.tolist()}))
