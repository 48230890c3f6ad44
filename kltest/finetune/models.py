"""Policy and reference of a run: any Hugging Face causal model, or a tiny one that is trained here first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kltest.errors import UsageError
from kltest.finetune.reference import trained
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Task
from kltest.language_models.language import LanguageModel
from kltest.language_models.models import in_double, is_tiny, needs_transformers, pretrained


@dataclass(frozen=True)
class Models:
    """The policy to train, and the frozen reference that it starts from."""

    policy: LanguageModel
    reference: LanguageModel


def load(settings: Settings, task: Task, device: torch.device) -> Models:
    """Return the models of a run, on a device and without dropout: a policy is one distribution.

    Raises:
        UsageError: The model cannot be loaded, or transformers is not installed.
    """
    needs_transformers()
    if is_tiny(settings.model):
        model, tokenizer = trained(settings, task)
    else:
        model, tokenizer = pretrained(settings.model)
    model = (in_double(model) if settings.dtype == "float64" else model.float()).to(device).eval()
    # Weights stay float32: the updates of a fine-tuning are smaller than bfloat16 can add to them.
    compute_dtype = torch.bfloat16 if settings.dtype == "bfloat16" else None
    policy = LanguageModel.of(model, tokenizer, compute_dtype, chat=settings.chat)
    return Models(replace(policy, compiled=_compiled(model)) if settings.compile else policy, policy.frozen())


def _compiled(model: Any) -> Any:
    """The compiled model; UsageError if torch finds no compiler."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2, device=next(model.parameters()).device))
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"compile: torch.compile does not work here ({words[0]}); set compile=false") from error
    return torch.compile(model, dynamic=True)
