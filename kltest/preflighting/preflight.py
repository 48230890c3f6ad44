"""`kltest.preflight`: a few passes over one batch show whether a KL term is what it is meant to be."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kltest.errors import UsageError
from kltest.language_models.language import LanguageModel, unwrapped
from kltest.language_models.models import needs_transformers, pretrained
from kltest.preflighting.batches import read
from kltest.preflighting.checks import CHECKS, unchanged
from kltest.preflighting.models import Pair, bare, has_adapters, left_as_found
from kltest.preflighting.report import FAILED, NOT_LOOKED_AT, PASSED, Preflight
from kltest.preflighting.scene import Scene
from kltest.preflighting.subjects import Whole, runs_the_model, subject_of
from kltest.version import versions

UNLIMITED = 2**62


def preflight(
    loss: Callable[..., Any] | str,
    model: nn.Module | LanguageModel,
    ref: nn.Module | LanguageModel | str | os.PathLike[str] | None,
    batch: Mapping[str, Any],
    *,
    beta: float | None = None,
    arguments: Mapping[str, Any] | None = None,
    placement: str | None = None,
    credit: str | None = None,
    temperature: float = 1.0,
    on_policy: bool = True,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    ref_tokenizer: Any = None,
    name: str | None = None,
) -> Preflight:
    """Check before training that a KL term is 0 at equal weights, reaches the weights, and leaves padding alone.

    A few forward passes over the batch and one backward pass. Weights, gradients, modes, buffers and random numbers
    are left as they were, bit for bit. Under FSDP call it on every rank.

    Args:
        loss: A callable that is filled by name with fields of rollouts (logp, ref_logp, old_logp, mask, beta, … as
            `kltest.grade` fills it) or that runs the models itself (`model`, `ref`, `batch` or `inputs`); or a text, as
            for `kltest.grade`.
        model: The policy: a causal language model as of Hugging Face, with adapters or wrapped by FSDP or DDP.
        ref: The reference; a folder of one; None for the model with its adapters disabled, or if the batch has
            ref_logp.
        batch: prompt_ids (B, P) and completion_ids (B, T) with masks, or input_ids (B, L) with attention_mask and a
            mask of the completion, labels (B, L) or prompt_lengths (B,); perhaps old_logp, rollout_logp, ref_logp and
            advantages, by the names that trainers use.
        beta: The coefficient; default 1, or that of the object whose method the loss is.
        arguments: Arguments of the loss by name.
        placement: Position of a term that is filled by name: loss, reward, shaped-reward or both.
        credit: What a token in the reward is credited with.
        temperature: Divisor of the logits.
        on_policy: False if older weights drew the batch, so that ratios need not be 1.
        dtype: Type of autocast, if passes are made in it.
        tokenizer: The tokenizer of the model.
        ref_tokenizer: That of the reference.
        name: The name of the loss in the report.

    Returns:
        A Preflight: `verdict`, `findings`, `to_text()`, `to_json()`, `raise_for_failure()`.

    Raises:
        UsageError: The batch, the reference or the loss cannot be used; it says why.
        TargetError: The loss fails.
    """
    began = time.monotonic()
    if beta is not None and not beta:
        raise UsageError("β is 0: there is no KL term to look at; give the coefficient that training will have")
    policy = _language(model, tokenizer, dtype)
    vocabulary = getattr(_embedding(policy), "num_embeddings", UNLIMITED)
    given = read(batch, policy.pad if policy.pad >= 0 else None, vocabulary).to(policy.device)
    reference: LanguageModel | None
    if isinstance(ref, str | os.PathLike):
        needs_transformers()
        loaded, own = pretrained(str(ref))
        ref = loaded.to(policy.device, next(policy.model.parameters()).dtype).requires_grad_(False)
        ref_tokenizer = ref_tokenizer or own
    if ref is not None:
        reference = _language(ref, ref_tokenizer, dtype)
        if reference.device != policy.device:
            raise UsageError(f"the reference is on {reference.device} and the model on {policy.device}: move it there")
    elif has_adapters(policy.model) or not ("ref_logp" in given.fields or runs_the_model(loss)):
        reference = bare(policy)
    else:
        reference = None
    pair = Pair(policy, reference, temperature)
    options = {"arguments": arguments, "placement": placement, "credit": credit, "name": name, "beta": beta}
    with left_as_found(pair) as changed:
        scene = Scene(pair, given, on_policy=on_policy)
        subject = subject_of(loss, given, scene.tables, pair, model, ref, options)
        scene.call(subject, beta or (subject.own_beta if isinstance(subject, Whole) else None) or 1.0)
        findings = [each(scene) for each in CHECKS.values()]
    findings.append(unchanged(scene, changed))
    statuses = {one.check: one.status for one in findings}
    seen = {statuses["equal weights"], statuses["coefficient"]} != {NOT_LOOKED_AT}
    return Preflight(
        target=name or subject.name,
        verdict=FAILED if FAILED in statuses.values() else PASSED if seen else NOT_LOOKED_AT,
        beta=scene.beta,
        rollouts=len(given.ids),
        tokens=int(given.live.sum()),
        read=given.keys,
        findings=findings,
        passes=dict(pair.passes),
        notes=[] if isinstance(subject, Whole) else subject.loss.notes,
        versions=versions(torch),
        seconds=time.monotonic() - began,
    )


def _embedding(language: LanguageModel) -> Any:
    inner = unwrapped(language.model)
    return inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None


def _language(model: Any, tokenizer: Any, dtype: torch.dtype | None) -> LanguageModel:
    """Return a model as one that is run over ids; no end token is needed."""
    if isinstance(model, LanguageModel):
        return model
    if not isinstance(model, nn.Module):
        raise UsageError(f"a model is a module of torch; it is of type {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    config = getattr(unwrapped(model), "config", None)
    pad = next((one for each in (tokenizer, config) if (one := getattr(each, "pad_token_id", None)) is not None), -1)
    return LanguageModel(model, tokenizer, (), int(pad), dtype)
