"""What k2 in the loss lacks where its runs end: the variance of K, and the share of ∇KL(π‖ref) that it misses.

`python -m experiments.finetune.lacking 0 1 2 > experiments/finetune/lacking.csv` makes the runs of these seeds again, a
line a run, some four minutes of a core a seed. K is the sum of next-token KLs along a rollout.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kltest.files import as_csv
from kltest.finetune.evaluation import kl_and_entropy
from kltest.finetune.models import Models
from kltest.finetune.rollouts import draw, stream
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Task
from kltest.reproduce.frames import Row

from ..records import rounded
from .audits import audit, ended
from .experiment import FIGURES, settings_for
from .settings import BETA, BETAS, LACKING, SAME, TASKS


def lacking(seed: int, **changes: Any) -> Iterator[Row]:
    """A row for each task and β; `changes` are of the settings in SAME."""
    for name in TASKS:
        for beta in BETAS:
            one = {"seed": seed, "task": name, "beta": beta}
            settings = settings_for({**SAME, **one, "variant": LACKING["variant"], **changes})
            models, task = ended(settings)
            found = one | of_rollouts(models, task, settings)
            if beta == BETA:
                missed = audit(models, task, settings, LACKING["variant"], LACKING["units"]).missed
                found |= missed.named("missed") if missed else {}
            yield {name: rounded(value, FIGURES) for name, value in found.items()}


def of_rollouts(models: Models, task: Task, settings: Settings) -> Row:
    """Means of KL and reward; of K and R variances and covariance among rollouts of a prompt, means over prompts."""
    prompts, size = LACKING["prompts"], LACKING["group_size"]
    generator = stream(settings, "held-out", settings.steps, prompts)
    rollouts = draw(models.policy, task, settings, "held-out", generator, prompts, size)
    assert rollouts.reward is not None
    summed, reward = kl_and_entropy(models, rollouts, settings)[0].cpu(), rollouts.reward.cpu()
    return {"kl": float(summed.mean()), "reward": float(reward.mean()), **second_moments(summed, reward, size)}


def second_moments(summed: Tensor, reward: Tensor, size: int) -> Row:
    """Var K, Var R and Cov(K, R) within groups of `size` rows (unbiased), means over groups; K and R are (B,)."""
    within = [one.view(-1, size) - one.view(-1, size).mean(dim=1, keepdim=True) for one in (summed, reward)]
    pairs = {"kl_variance": (0, 0), "reward_variance": (1, 1), "covariance": (0, 1)}
    return {name: float((within[i] * within[j]).sum(dim=1).mean()) / (size - 1) for name, (i, j) in pairs.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(as_csv([row for seed in sys.argv[1:] for row in lacking(int(seed))]))
