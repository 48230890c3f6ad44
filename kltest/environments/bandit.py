"""The bandit: one context, one token, every rollout of length 1."""

from __future__ import annotations

import numpy as np

from kltest.environments.environment import Environment
from kltest.environments.sequence import sequence


def bandit(vocabulary: int = 4, *, prompts: np.ndarray | None = None, reward: np.ndarray | None = None) -> Environment:
    """Build a bandit: a token sequence of length 1.

    Args:
        vocabulary: Number V of arms.
        prompts: Probabilities (P,) of P separate bandits (default: one bandit).
        reward: Reward (P, V) of each arm (default: 0).

    Raises:
        InvalidEnvironmentError: A shape is wrong, a number is not finite, or probabilities do not sum to 1.
    """
    return sequence(vocabulary, 1, prompts=prompts, reward=reward, name="bandit")
