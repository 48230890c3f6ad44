"""The rollouts of a step, of an evaluation or of a measurement: prompts and uniforms from named streams, and rewards.

What is drawn depends on the seed, the step and the purpose alone: runs that differ in their KL term meet the same
prompts and uniforms, several processes the same as one, and a run that was resumed the same as one that was not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch

from kltest.finetune.processes import Processes
from kltest.finetune.reference import rewards
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Split, Task
from kltest.language_models.generation import generate
from kltest.language_models.language import Language
from kltest.language_models.rollouts import Rollouts

Purpose = Literal["train", "held-out", "out-of-distribution", "gradient"]


def longest(settings: Settings, task: Task) -> int:
    """max_tokens, or what the task needs."""
    return settings.max_tokens or task.max_tokens


def draw(
    sampler: Language,
    task: Task,
    settings: Settings,
    purpose: Purpose,
    numbers: tuple[int, ...],
    prompts: int,
    group_size: int,
    processes: Processes,
) -> Rollouts:
    """This process's share of prompts·group_size rollouts, with rewards; `numbers` say which draw of its kind it is."""
    generator = np.random.default_rng([settings.seed, 1 + get_args(Purpose).index(purpose), *numbers])
    split: Split = "train" if purpose in ("train", "gradient") else purpose  # type: ignore[assignment]
    problems = task.draw(split, prompts, generator)
    uniforms = torch.from_numpy(generator.random((prompts * group_size, longest(settings, task))))
    share = processes.share(prompts, "prompts")
    problems = problems[share]
    rows = slice(share.start * group_size, share.stop * group_size)
    encoded = [sampler.encode(one.prompt) for one in problems]
    rollouts = generate(sampler, encoded, uniforms[rows], temperature=settings.temperature)
    repeated = [one for one in problems for _ in range(group_size)]
    earned = rewards(sampler, task, repeated, rollouts.tokens, rollouts.mask)
    rollouts = replace(rollouts, reward=earned.to(sampler.device), group=rollouts.group + share.start)
    return rollouts.widened(processes.largest(rollouts.tokens.shape[1]))
