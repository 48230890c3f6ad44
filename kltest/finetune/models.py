"""Policy and reference of a run: any Hugging Face causal model, or a tiny one.

The reference of a tiny model is made by supervised learning on the task until it earns the requested reward; it is then
kept in a cache.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.errors import UsageError
from kltest.files import cache_folder
from kltest.finetune.rollouts import draw
from kltest.finetune.settings import AUTO, Settings
from kltest.finetune.tasks import Problem, Task
from kltest.language_models.language import LanguageModel, padded
from kltest.language_models.models import (
    device_named,
    in_double,
    is_tiny,
    needs_transformers,
    parameters_asked,
    pretrained,
    save,
    tiny_model,
    tiny_tokenizer,
)
from kltest.loss.global_state import preserved
from kltest.sweeps.progress import Progress
from kltest.sweeps.store import digest

# Part of the cache key: raised when references are trained in another way.
VERSION = 2
BATCH = 64
RATE = 3e-3
# The reward is measured every so many updates, on so many held-out prompts.
EVALUATE_EVERY, EVALUATED = 25, 128


@dataclass(frozen=True)
class Models:
    """The policy to train, the frozen reference that it starts from, and the dtype in which the model came."""

    policy: LanguageModel
    reference: LanguageModel
    dtype: torch.dtype = torch.float32


def load(settings: Settings, task: Task, device: torch.device) -> Models:
    """Return the models of a run, on a device and without dropout: a policy is one distribution.

    Raises:
        UsageError: The model cannot be loaded, or transformers is not installed.
    """
    needs_transformers()
    model, tokenizer = trained(settings, task) if is_tiny(settings.model) else pretrained(settings.model)
    came, dtype = model.dtype, settings.resolved.dtype
    model = (in_double(model) if dtype == "float64" else model.float()).to(device).eval()
    # Weights stay float32: the updates of a fine-tuning are smaller than bfloat16 can add to them.
    compute_dtype = torch.bfloat16 if dtype == "bfloat16" else None
    policy = _ended(LanguageModel.of(model, tokenizer, compute_dtype), task)
    reference = _with_adapters(policy, settings) if settings.lora else policy.frozen()
    return Models(policy, reference, came)


def _with_adapters(policy: LanguageModel, settings: Settings) -> LanguageModel:
    """Give the policy adapters, which alone are trained, and return it without them as the reference."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise UsageError("lora: adapters need another library: python -m pip install peft") from None
    if getattr(policy.model, "_hf_peft_config_loaded", False):
        raise UsageError("lora: the model comes with adapters; merge them into its weights first (merge_and_unload)")
    with preserved(settings.seed):
        config = LoraConfig(r=settings.lora, lora_alpha=settings.lora, target_modules="all-linear")
        policy.model.add_adapter(config)  # type: ignore[operator]
    policy.cast(policy.model)
    return replace(policy, bare=True)


def _ended(language: LanguageModel, task: Task) -> LanguageModel:
    return language.of_fixed_length() if getattr(task, "fixed_length", False) else language


def device_of(name: str) -> torch.device:
    """Return the device of a name; UsageError if it cannot be used. "auto" is a GPU if there is one."""
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device_named(name, "device")


def trained(settings: Settings, task: Task) -> tuple[Any, Any]:
    """Return a model and its tokenizer, from the cache or trained now, always on the CPU in float32."""
    from transformers import LlamaForCausalLM

    key = (parameters_asked(settings.model), settings.seed, settings.reference_steps, settings.reference_reward)
    folder = cache_folder("KLTEST_MODELS", "models") / digest(VERSION, task.name, *key)
    tokenizer = tiny_tokenizer(task.characters)
    if not folder.exists():
        save(_learned(settings, task, tokenizer), tokenizer, folder)
    try:  # even if it was trained just now, so that every run starts from the same bytes
        return LlamaForCausalLM.from_pretrained(folder), tokenizer
    except Exception as error:  # whatever it is that the bytes of a damaged file lead to
        raise UsageError(f"the reference that is kept in {folder} is damaged: remove that folder") from error


def _learned(settings: Settings, task: Task, tokenizer: Any) -> Any:
    with preserved(settings.seed):
        model = tiny_model(
            parameters_asked(settings.model), len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id
        )
    language = _ended(LanguageModel.of(model, tokenizer), task)
    plain = replace(settings, max_tokens=0, temperature=1.0)
    generator = np.random.default_rng([settings.seed, 0, VERSION])
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    # A warm-up and no decay, since the last update is not known beforehand.
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 50))
    with Progress("reference", settings.reference_steps) as progress:
        for step in range(1, settings.reference_steps + 1):
            loss = _cross_entropy(language, task.draw("train", BATCH, generator))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            warm.step()
            progress.advance(f"loss {loss.item():.2f}" if step % EVALUATE_EVERY == 0 else "")
            if step % EVALUATE_EVERY == 0:
                drawn = draw(language, task, plain, "held-out", generator, EVALUATED)
                if drawn.reward.mean() >= settings.reference_reward:  # type: ignore[union-attr]
                    break
    return model


def _cross_entropy(language: LanguageModel, problems: list[Problem]) -> Tensor:
    """Mean over the tokens of completions, with the end if there is one, given the prompts."""
    prompts = [language.encode(one.prompt) for one in problems]
    targets = [[*language.encode(one.completion), *language.end[:1]] for one in problems]
    ids, mask = padded([one + two for one, two in zip(prompts, targets, strict=True)], language.pad)
    logits, _ = language.forward(ids[:, :-1], mask[:, :-1], keep=ids.shape[1] - 1)
    position = torch.arange(1, ids.shape[1])
    supervised = position >= ids.shape[1] - torch.tensor([len(one) for one in targets])[:, None]
    return torch.nn.functional.cross_entropy(logits[supervised], ids[:, 1:][supervised])
