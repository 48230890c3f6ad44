"""The bandit: one context, one token, every rollout of length 1."""

from __future__ import annotations

import numpy as np

from kltest.environments.environment import Environment
from kltest.environments.sequence import sequence


def bandit(vocabulary: int = 4, *, prompts: np.ndarray | None = None, reward: np.ndarray | None = None) -> Environment:
    """`vocabulary` arms, pulled once: a token sequence of length 1.

    `prompts` (P,) are the probabilities of P separate bandits (default one); `reward` (P, V) pays each arm (default 0).
    """
    return sequence(vocabulary, 1, prompts=prompts, reward=reward, name="bandit")
