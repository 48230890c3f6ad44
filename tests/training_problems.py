"""Problems to train on, one for each kind of environment, seed and reward."""

from functools import cache

import numpy as np

from kltest.environments import bandit, mdp, ngram, ragged, sequence
from kltest.training import Problem

ENVIRONMENTS = {
    "bandit": lambda: bandit(4),
    "prompts": lambda: bandit(3, prompts=np.array([0.3, 0.7])),
    "sequence": lambda: sequence(3, 3),
    "ragged": lambda: ragged(3, 3),
    "mdp": lambda: mdp(4, 2, 3),
    "ngram": lambda: ngram(3, 3, 2),
    "many arms": lambda: bandit(40),
}


@cache
def problem(environment: str, seed: int = 0, reward: str = "normal") -> Problem:
    return Problem.draw(ENVIRONMENTS[environment](), seed, reward=reward)
