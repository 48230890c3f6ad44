"""Policy and reference of a run: any Hugging Face causal model, or a tiny one that is trained here first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kltest.errors import UsageError
from kltest.finetune.reference import trained
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Task
from kltest.language_models.language import Language
from kltest.language_models.models import in_double, needs_transformers, pretrained


@dataclass(frozen=True)
class Models:
    """The policy, to be trained, and the frozen reference that it starts from, with one tokenizer."""

    policy: Language
    reference: Language


def load(settings: Settings, task: Task, device: torch.device) -> Models:
    """The models that the settings ask for, on a device; dropout is off in both, since a policy is one distribution.

    Raises UsageError for a model that there is not, and where transformers is not installed.
    """
    needs_transformers()
    if settings.model == "tiny" or settings.model.startswith("tiny:"):
        model, tokenizer = trained(settings, task)
    else:
        model, tokenizer = pretrained(settings.model)
    model = (in_double(model) if settings.dtype == "float64" else model.float()).to(device).eval()
    # The weights stay float32: the updates of a fine-tuning are smaller than bfloat16 can add to them.
    passes = torch.bfloat16 if settings.dtype == "bfloat16" else None
    policy = Language.of(model, tokenizer, passes, chat=settings.chat)
    return Models(replace(policy, compiled=_compiled(model)) if settings.compile else policy, policy.frozen())


def _compiled(model: Any) -> Any:
    """UsageError where torch finds no compiler."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2, device=next(model.parameters()).device))
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"compile: torch.compile does not work here ({words[0]}); set compile=false") from error
    return torch.compile(model, dynamic=True)
