"""Tabular Markov decision processes with sparse stochastic dynamics and a stationary policy."""

from __future__ import annotations

import numpy as np

from kltest.environments.environment import Environment
from kltest.errors import InvalidEnvironmentError


def mdp(
    states: int = 5,
    actions: int = 3,
    horizon: int = 3,
    *,
    branches: int = 2,
    seed: int = 0,
    start: np.ndarray | None = None,
    name: str = "mdp",
) -> Environment:
    """A random process in which every action leads to `branches` states, with probabilities drawn from a Dirichlet(1).

    Rewards are standard normal. `start` (states,) is the distribution of the first state (default: uniform over two).
    """
    if not 1 <= branches <= states or actions < 1:
        raise InvalidEnvironmentError(
            f"environment {name!r}: needs at least one action and 1 to {states} branches, not {actions} and {branches}"
        )
    generator = np.random.default_rng(seed)
    first = generator.integers(states, size=(states, actions, 1))
    stride = generator.integers(1, max(states // branches, 1) + 1, size=(states, actions, 1))
    successors = (first + stride * np.arange(branches)) % states
    probabilities = generator.dirichlet(np.ones(branches), size=(states, actions))
    if start is None:
        start = np.zeros(states)
        start[: min(2, states)] = 1 / min(2, states)
    return tabular(
        successors, probabilities, generator.standard_normal((states, actions)), horizon, start=start, name=name
    )


def tabular(
    successors: np.ndarray,
    probabilities: np.ndarray,
    reward: np.ndarray,
    horizon: int,
    *,
    start: np.ndarray,
    name: str = "mdp",
) -> Environment:
    """The process with the given sparse dynamics: successors and probabilities (S, A, K), reward (S, A), start (S,).

    A successor of −1 ends the rollout; one with probability 0 is not there.

    Raises:
        InvalidEnvironmentError: Probabilities do not sum to 1, shapes disagree, or a successor is listed twice.
    """
    start = np.asarray(start, dtype=float)
    if start.shape != np.shape(successors)[:1]:
        raise InvalidEnvironmentError(
            f"environment {name!r}: `start` must give the {len(successors)} states' probabilities of coming first, "
            f"not have shape {start.shape}"
        )
    support = np.flatnonzero(start)
    return Environment(
        name=name,
        horizon=horizon,
        start=support,
        prompts=start[support],
        successors=np.asarray(successors, dtype=np.int64),
        probabilities=np.asarray(probabilities, dtype=float),
        reward=np.asarray(reward, dtype=float),
        tree=False,
    )
