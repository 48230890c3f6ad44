"""The best reward at a KL: π* ∝ ref·e^(R/β), from the reference's chance of a reward, prompt by prompt.

A reward is 0 or 1, so that of a prompt nothing matters but the reference's chance p of earning it:

    Z = 1 − p + p·e^(1/β)    E_π*[R] = p·e^(1/β)/Z    KL(π*‖ref) = E_π*[R]/β − log Z    objective: β·log Z

Chances are estimated, each from as many rollouts. What comes of them is concave in p, so a little too low, the more so
the smaller β is: a prompt that is never solved in so many rollouts counts as one that cannot be.
"""

from functools import lru_cache

import numpy as np

from kltest.finetune.models import load
from kltest.finetune.processes import Processes
from kltest.finetune.rollouts import draw
from kltest.finetune.settings import settings_of
from kltest.finetune.tasks import task_named

ROLLOUTS = 128
"""Of each prompt."""
AT_ONCE = 32
"""Prompts whose rollouts are drawn together."""


def optimal(chances: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """(P,) the reward of π* and its KL to the reference, for the reference's chances (P,) of a reward of 1."""
    with np.errstate(divide="ignore"):
        right, wrong = np.log(chances), np.log1p(-chances)
    # log Z − 1/β, which does not overflow.
    log_share = np.logaddexp(right, wrong - 1 / beta)
    reward = np.exp(right - log_share)
    return reward, (reward - 1) / beta - log_share


@lru_cache(maxsize=8)
def chances_of(
    seed: int, model: str, task: str, reference_reward: float, prompts: int, device: str, dtype: str
) -> np.ndarray:
    """(P,) how often the reference of a run with these settings earns the reward, for held-out prompts."""
    settings = settings_of(
        {
            **{"model": model, "task": task, "reference_reward": reference_reward, "seed": seed},
            **{"device": device, "dtype": dtype, "threads": 1, "kl": "none"},
        }
    )
    processes, verifier = Processes.here(device), task_named(task)
    reference = load(settings, verifier, processes.device).reference
    found = []
    for first in range(0, prompts, AT_ONCE):
        count = min(AT_ONCE, prompts - first)
        rollouts = draw(reference, verifier, settings, "held-out", (0, first), count, ROLLOUTS, processes)
        assert rollouts.reward is not None
        found.append(rollouts.reward.cpu().double().numpy().reshape(count, ROLLOUTS).mean(axis=1))
    return np.concatenate(found)
