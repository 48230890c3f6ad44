"""Dynamic programming over time: where a policy goes, and what follows from there. No enumeration, no autograd.

A *visitation* d_t(c) is the probability of standing in context c at time t; an *onward* value is what a token leads to,
O(c, v) = Σ_c' P(c'|c, v)·x(c'). Time runs from 0 to the horizon − 1; the last step leads nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt

import numpy as np

from kltest.environments import END, Environment

# Above this, forward states are recomputed from √T checkpoints while time runs backwards.
MEMORY = 2**28


def start(environment: Environment, moments: int = 1) -> np.ndarray:
    """(C, moments) the visitation at time 0, followed by zero moments."""
    first = np.zeros((environment.n_contexts, moments))
    first[:, 0] = environment.start_distribution()
    return first


def forward(environment: Environment, weights: np.ndarray, state: np.ndarray) -> np.ndarray:
    """(C, k) → (C, k): one step of Σ_{c,v} x(c)·weights(c, v)·P(·|c, v); weights (C, V) are the policy's chances."""
    if state.shape[1] == 1:
        return (environment.transition.T @ (state * weights).ravel())[:, None]
    return environment.transition.T @ (state[:, None, :] * weights[:, :, None]).reshape(-1, state.shape[1])


def onward(environment: Environment, values: np.ndarray) -> np.ndarray:
    """(C,) → (C, V): the expected value of where each token leads; 0 where the rollout ends."""
    return (environment.transition @ values).reshape(environment.n_contexts, environment.vocabulary)


def visits(environment: Environment, weights: np.ndarray) -> Iterator[np.ndarray]:
    """d_0, d_1, … (C,) until the horizon, or until every rollout has ended."""
    state = start(environment)
    for step in range(environment.horizon):
        yield state[:, 0]
        if step < environment.horizon - 1:
            state = forward(environment, weights, state)
            if not state.any():
                return


def total_visits(environment: Environment, log_probs: np.ndarray) -> np.ndarray:
    """(C,) Σ_t d_t: the expected number of visits of each context."""
    total = np.zeros(environment.n_contexts)
    for visit in visits(environment, np.exp(log_probs)):
        total += visit
    return total


def ending(environment: Environment) -> np.ndarray:
    """(C, V) probability that a token ends the rollout before the horizon."""
    return np.where(environment.successors == END, environment.probabilities, 0.0).sum(axis=2)


def backwards(step: Callable[[np.ndarray], np.ndarray], first: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """first, step(first), step(step(first)), … of that count, last one first.

    Keeps all of them where they fit into MEMORY, else every √count-th and works the others out a second time.
    """
    stride = 1 if count * first.nbytes <= MEMORY else isqrt(count - 1) + 1
    kept, state = [first], first
    for index in range(1, count):
        state = step(state)
        if index % stride == 0:
            kept.append(state)
    for segment in range(len(kept) - 1, -1, -1):
        states = [kept.pop()]
        while len(states) < min(stride, count - segment * stride):
            states.append(step(states[-1]))
        yield from reversed(states)
