"""Rollouts of a training step, an evaluation or a measurement: prompts, completions and rewards.

The random streams depend on the seed, the step and the purpose alone. Runs that differ in their KL term therefore meet
the same prompts and uniforms; so do a run that was resumed and one that was not.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Problem, Split, Task
from kltest.language_models.generation import Rollouts, generate
from kltest.language_models.language import LanguageModel
from kltest.loss.frames import failure

Purpose = Literal["train", "held-out", "out-of-distribution", "gradient"]


def longest(settings: Settings, task: Task) -> int:
    """Return the most tokens of a rollout: max_tokens, or what the task needs."""
    return settings.max_tokens or task.max_tokens


def check_prompts(sampler: LanguageModel, task: Task, settings: Settings) -> None:
    """Raise UsageError if a prompt that the task can list is too long for the model; the longest texts are tried."""
    for prompt in nlargest(64, getattr(task, "prompts", ()), key=len):
        sampler.check_length(len(sampler.encode(prompt)), longest(settings, task))


def stream(settings: Settings, purpose: Purpose, *numbers: int) -> np.random.Generator:
    """Return the random stream of a purpose; `numbers` say which draw it is, such as a step."""
    return np.random.default_rng([settings.seed, 1 + get_args(Purpose).index(purpose), *numbers])


def draw(
    sampler: LanguageModel,
    task: Task,
    settings: Settings,
    split: Split,
    generator: np.random.Generator,
    prompts: int,
    group_size: int = 1,
) -> Rollouts:
    """Draw prompts of a split and `group_size` rollouts of each, with rewards, and gold scores if held out."""
    problems = task.draw(split, prompts, generator)
    uniforms = torch.from_numpy(generator.random((prompts * group_size, longest(settings, task))))  # (B, T)
    encoded = [sampler.encode(one.prompt) for one in problems]
    with sampler.autocast():  # weights are cast once for the whole generation
        rollouts = generate(sampler, encoded, uniforms, temperature=settings.temperature)
    repeated = [one for one in problems for _ in range(group_size)]
    names = ("reward", "gold") if split == "held-out" and hasattr(task, "gold") else ("reward",)
    return replace(rollouts, **{name: _scores(sampler, task, name, repeated, rollouts) for name in names})


def _scores(sampler: LanguageModel, task: Task, name: str, problems: Sequence[Problem], rollouts: Rollouts) -> Tensor:
    """(B,) float64 from the task's method of that name; a text without an end is scored as it is."""
    what, score = f"the {name} of task {task.name}", getattr(task, name)
    found: list[float] = []
    for problem, text in zip(problems, sampler.texts(rollouts.tokens, rollouts.mask), strict=True):
        try:
            found.append(float(score(problem, text)))
        except Exception as error:
            raise failure(what, error) from error
        if not math.isfinite(found[-1]):
            raise TargetError(f"{what} is {found[-1]} for {text!r} after {problem.prompt!r}")
    return torch.tensor(found, dtype=torch.float64, device=sampler.device)
