"""The worlds that a loss is graded in: small, mild, drawn from the seed, three to fit on and one held out."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from kltest.environments import Environment, Instance, bandit, mdp, ragged, sequence
from kltest.grading.identify import HELD_OUT

FITTED = 3
DEFAULT_ENVIRONMENTS = ("bandit", "sequence", "ragged")


def _with_reward(build: Callable[..., Environment], vocabulary: int, *size: int) -> Callable[[int], Environment]:
    def draw(seed: int) -> Environment:
        contexts = build(vocabulary, *size).n_contexts
        reward = np.random.default_rng(seed).standard_normal((contexts, vocabulary))
        return build(vocabulary, *size, reward=reward)

    return draw


WORLDS: dict[str, Callable[[int], Environment]] = {
    "bandit": _with_reward(bandit, 4),
    "sequence": _with_reward(sequence, 3, 3),
    "ragged": _with_reward(ragged, 3, 3),
    "mdp": lambda seed: mdp(5, 3, 3, seed=seed),
}


@lru_cache(maxsize=64)
def instances(environment: str, seed: int) -> tuple[Instance, ...]:
    """The instances of a world that grading looks at, the held-out one last.

    Mild (|Σ log π/ref| < 2 and |Σ log π/μ| < 1 along every rollout), so that clamps and overflows stay silent here.
    """
    salt = zlib.crc32(environment.encode())
    children = np.random.SeedSequence([seed, salt]).spawn(FITTED + HELD_OUT)
    drawn = []
    for child in children:
        world_seed, policy_seed = (int(number) for number in child.generate_state(2))
        drawn.append(Instance.draw(WORLDS[environment](world_seed), policy_seed))
    return tuple(drawn)
