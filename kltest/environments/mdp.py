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
    """Draw a random decision process; transition probabilities are Dirichlet(1), rewards standard normal.

    Args:
        states: Number S of states (contexts).
        actions: Number of actions (tokens).
        horizon: Number of steps.
        branches: Number of states that an action may lead to.
        seed: Seed of dynamics and rewards.
        start: Distribution (S,) of the first state (default: uniform over the first two).
        name: Name for messages.

    Raises:
        InvalidEnvironmentError: There is no action, or `branches` is not between 1 and `states`.
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
    """Build a decision process from sparse dynamics.

    Args:
        successors: States (S, A, K) int to which an action may lead; −1 ends the rollout.
        probabilities: Probabilities (S, A, K) of the successors; entries of probability 0 are ignored.
        reward: Reward (S, A) of an action in a state.
        horizon: Number of steps.
        start: Distribution (S,) of the first state.
        name: Name for messages.

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
