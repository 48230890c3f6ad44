"""`kltest.audit`: measure the gradient that a loss follows on a language model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from kltest.auditing.models import PROMPTS
from kltest.auditing.passes import CutModel, Models
from kltest.auditing.report import Audit
from kltest.auditing.run import LEAST, UNITS, Auditing
from kltest.auditing.units import drawn, of_batch
from kltest.errors import UsageError
from kltest.grading.options import Options
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel
from kltest.samples.sketch import SIZE


def audit(
    loss: Callable[..., Any] | str,
    model: nn.Module | LanguageModel,
    ref: nn.Module | LanguageModel,
    batch: Any = None,
    *,
    sampler: nn.Module | LanguageModel | None = None,
    prompts: Sequence[str] = (),
    units: int = UNITS,
    expect: str | Mapping[str, float] = "reverse_kl",
    placement: str | None = None,
    credit: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    beta: float | None = None,
    error_rate: float = 0.01,
    margin: float = 0.05,
    seed: int = 0,
    group_size: int = 4,
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    sketch: int = SIZE,
    name: str | None = None,
    models: Mapping[str, str | None] | None = None,
    progress: Callable[[int], None] = lambda units: None,
) -> Audit:
    """Measure the gradient that a loss follows on a language model, and compare it with the named gradients.

    The loss is called on rollouts as `kltest.grade` calls it; its gradient at the log-probs is pulled back through the
    model. The model's own gradients (`.grad`), mode and random numbers are left as they were.

    Args:
        loss: A callable, or a text as for `kltest.grade`.
        model: The policy: a causal model as of Hugging Face, or a LanguageModel.
        ref: The reference, of the same vocabulary.
        batch: Rollouts, or a mapping of tensors with prompt_ids (B, P) and completion_ids (B, T), perhaps prompt_mask,
            completion_mask, old_per_token_logps (B, T), rewards (B,) and group (B,); or a list of them. None: rollouts
            are drawn for `prompts`.
        sampler: The policy that drew the rollouts, if it is another one.
        prompts: Texts to draw rollouts for; the model must then be a LanguageModel.
        units: Most prompts, each with its rollouts, that are drawn.
        expect: The gradient that is claimed, or a combination.
        placement: Position of the term: loss, reward, shaped-reward or both.
        credit: What a token in the reward is credited with: return, to-go or immediate.
        arguments: Arguments of the loss by name.
        beta: Coefficient of the KL part, passed to the loss.
        error_rate: Highest probability that anything in the report is wrong.
        margin: Largest distance from the declared gradient, as a share of its norm, that is confirmed.
        seed: Seed of the rollouts and of the sketch.
        group_size: Rollouts of a prompt.
        max_new_tokens: Longest rollout.
        temperature: Divisor of the logits of all models.
        sketch: Numbers that are kept of each gradient.
        name: The name of the loss in the report.
        models: The names of model, ref and sampler in the report.
        progress: Called with the number of units after each.

    Returns:
        An Audit: `verdict`, `follows`, `named`, `scalars()` for a log, `to_json()`.

    Raises:
        UsageError: An option, the loss or the batch cannot be used.
        TargetError: The loss fails.
    """
    given = {"expect": expect, "placement": placement, "credit": credit, "arguments": arguments, "beta": beta}
    options = Options.of(**given, error_rate=error_rate, margin=margin, seed=seed, group_size=group_size, name=name)
    policy, reference = LanguageModel.of(model), LanguageModel.of(ref)
    drawing = None if sampler is None else LanguageModel.of(sampler)
    if batch is not None:
        found = of_batch(batch, policy, group_size)
        source: Iterable[Rollouts] = found
        units = min(units, len(found))
        if units < LEAST:
            raise UsageError(f"{units} prompts with rollouts are too few for intervals; give at least {LEAST}")
    else:
        lengths = {"group_size": group_size, "max_new_tokens": max_new_tokens}
        source = drawn(drawing or policy, list(prompts) or PROMPTS, **lengths, temperature=temperature, seed=seed)
    with still(policy, reference, drawing):
        third = None if drawing is None else CutModel(drawing)
        run = Auditing(loss, Models(CutModel(policy), CutModel(reference), third, temperature), options, sketch, units)
        return replace(run.over(source, progress), models=dict(models or {}))


@contextmanager
def still(*languages: LanguageModel | None) -> Iterator[None]:
    """Models in evaluation mode; they are put back into theirs at the end."""
    modes = {module: module.training for one in languages if one is not None for module in one.model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put the buffers of a model back as they were, the same tensors with the same numbers."""
    buffers = [(one, name, held) for one in model.modules() for name, held in one._buffers.items() if held is not None]
    values = [held.clone() for _, _, held in buffers]
    try:
        yield
    finally:
        for (module, name, held), value in zip(buffers, values, strict=True):
            module._buffers[name] = held.copy_(value)
