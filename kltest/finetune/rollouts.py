"""Rollouts of a training step, an evaluation or a measurement: prompts, completions and rewards.

The random streams depend on the seed, the step and the purpose alone. Runs that differ in their KL term therefore meet
the same prompts and uniforms; so do a run that was resumed and one that was not.
"""

from dataclasses import replace
from functools import partial
from heapq import nlargest
from typing import Literal, get_args

import numpy as np
import torch

from kltest.finetune.models import rewards
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Split, Task
from kltest.language_models.generation import Rollouts, generate
from kltest.language_models.language import LanguageModel

Purpose = Literal["train", "held-out", "out-of-distribution", "gradient"]


def longest(settings: Settings, task: Task) -> int:
    """Return the most tokens of a rollout: max_tokens, or what the task needs."""
    return settings.max_tokens or task.max_tokens


def check_prompts(sampler: LanguageModel, task: Task, settings: Settings) -> None:
    """Raise UsageError if a prompt that the task can list is too long for the model; the longest texts are tried."""
    for prompt in nlargest(64, getattr(task, "prompts", ()), key=len):
        sampler.check_length(len(sampler.encode(prompt)), longest(settings, task))


def draw(
    sampler: LanguageModel,
    task: Task,
    settings: Settings,
    purpose: Purpose,
    numbers: tuple[int, ...],
    prompts: int,
    group_size: int,
) -> Rollouts:
    """Draw prompts·group_size rollouts, with rewards.

    `purpose` chooses the random stream and the split, `numbers` say which draw of this purpose it is, such as (step,).
    """
    generator = np.random.default_rng([settings.seed, 1 + get_args(Purpose).index(purpose), *numbers])
    split: Split = "train" if purpose in ("train", "gradient") else purpose  # type: ignore[assignment]
    problems = task.draw(split, prompts, generator)
    uniforms = torch.from_numpy(generator.random((prompts * group_size, longest(settings, task))))  # (B, T)
    encoded = [sampler.encode(one.prompt) for one in problems]
    with sampler.autocast():  # weights are cast once for the whole generation
        rollouts = generate(sampler, encoded, uniforms, temperature=settings.temperature)
    repeated = [one for one in problems for _ in range(group_size)]
    scored = partial(rewards, sampler, task, repeated, rollouts.tokens, rollouts.mask)
    rollouts = replace(rollouts, reward=scored().to(sampler.device))
    if purpose == "held-out" and hasattr(task, "gold"):
        rollouts = replace(rollouts, gold=scored(gold=True).to(sampler.device))
    return rollouts
