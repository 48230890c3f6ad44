"""Dynamic programming over time: visitations, onward values and signals. No enumeration, no autograd.

A *visitation* d_t(c) is the probability of context c at time t; an *onward* value is the expected value after a token,
O(c, v) = Σ_c' P(c'|c, v)·x(c'). Time runs from 0 to the horizon − 1; the last step leads nowhere.
"""

from collections.abc import Callable, Iterator, Sequence
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from kltest.environments import END, Environment

if TYPE_CHECKING:
    from scipy import sparse

    Powers = Sequence[sparse.csr_array | sparse.csc_array]

# Bytes of forward states; beyond that they are recomputed from checkpoints while time runs backwards.
MEMORY = 2**28
# A longer horizon is not gone through step by step where each context has a time step of its own.
LONG = 32


def start(environment: Environment, moments: int = 1) -> np.ndarray:
    """Return (C, moments): the visitation at time 0, then zeros."""
    first = np.zeros((environment.n_contexts, moments))
    first[:, 0] = environment.start_distribution()
    return first


def forward(environment: Environment, weights: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Advance a state (C, k) by one step, Σ_{c,v} x(c)·weights(c, v)·P(·|c, v), with weights (C, V)."""
    if state.shape[1] == 1:
        return (environment.products[1] @ (state * weights).ravel())[:, None]
    return environment.products[1] @ (state[:, None, :] * weights[:, :, None]).reshape(-1, state.shape[1])


def carry(environment: Environment, chances: np.ndarray, cost: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Advance the visitation and the summed cost so far (C, 2), under probabilities (C, V), by one step."""
    grown = forward(environment, chances, state)
    grown[:, 1:] += forward(environment, chances * cost, state[:, :1])
    return grown


def onward(environment: Environment, values: np.ndarray) -> np.ndarray:
    """Return the expected value (C, V) after each token, of values (C,); the end of a rollout counts 0."""
    return (environment.products[0] @ values).reshape(environment.n_contexts, environment.vocabulary)


def visits(environment: Environment, weights: np.ndarray) -> Iterator[np.ndarray]:
    """Yield d_0, d_1, … (C,) until the horizon, or until every rollout has ended."""
    state = start(environment)
    for step in range(environment.horizon):
        yield state[:, 0]
        if step < environment.horizon - 1:
            state = forward(environment, weights, state)
            if not state.any():
                return


def powers(environment: Environment, chances: np.ndarray) -> "Powers | None":
    """Return M, M², M⁴, … of the step M (C, C) from one context to the next, under probabilities (C, V).

    None if the horizon is short, or if a context may be visited at two times: then time has to be gone through.
    """
    if not environment.tree or environment.horizon <= LONG:
        return None
    from scipy import sparse  # slow to import

    contexts, vocabulary = chances.shape
    cells = environment.transition.multiply(chances.reshape(-1, 1)).tocoo()
    squared = [sparse.csr_array((cells.data, (cells.row // vocabulary, cells.col)), (contexts, contexts))]
    while 2 ** len(squared) <= environment.horizon:
        squared.append(squared[-1] @ squared[-1])
    beyond = over_all_steps(squared, np.ones(contexts), environment.horizon)[1]
    return None if beyond.any() else squared


def over_all_steps(squared: "Powers", numbers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Σ_{k<n} Mᵏx and Mⁿx for numbers x (C,) and n = `count` steps, from M, M², M⁴, …."""
    total = np.zeros(len(numbers))
    for index, power in enumerate(squared):
        if count >> index & 1:
            part = numbers
            for lower in squared[:index]:
                part = part + lower @ part
            total, numbers = total + part, power @ numbers
    return total, numbers


def _visited(environment: Environment, squared: "Powers") -> np.ndarray:
    transposed = [power.T for power in squared]
    return over_all_steps(transposed, environment.start_distribution(), environment.horizon)[0]


def total_visits(environment: Environment, log_probs: np.ndarray) -> np.ndarray:
    """Return the expected number of visits Σ_t d_t (C,) of each context, under log-probs (C, V)."""
    if squared := powers(environment, np.exp(log_probs)):
        return _visited(environment, squared)
    total = np.zeros(environment.n_contexts)
    for visit in visits(environment, np.exp(log_probs)):
        total += visit
    return total


def ending(environment: Environment) -> np.ndarray:
    """Return the probability (C, V) that a token ends the rollout before the horizon."""
    return np.where(environment.successors == END, environment.probabilities, 0.0).sum(axis=2)


def backwards(step: Callable[[np.ndarray], np.ndarray], first: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yield the `count` states first, step(first), step(step(first)), … in reverse order.

    All are kept if they fit into MEMORY; else every √count-th, or as many as fit, and each part between two is yielded
    in the same way, so that memory does not grow with `count`.
    """
    room = max(MEMORY // first.nbytes, 2)
    stride = 1 if count <= room else max(isqrt(count - 1) + 1, -(-count // room))
    kept, state = [first], first
    for index in range(1, count):
        state = step(state)
        if index % stride == 0:
            kept.append(state)
    if stride == 1:
        yield from reversed(kept)
        return
    for segment in range(len(kept) - 1, -1, -1):
        yield from backwards(step, kept.pop(), min(stride, count - segment * stride))


def from_signal(signal: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return the gradient (C, V) at the logits, π·(S − Σ_v π·S), of a signal S (C, V)."""
    # Relative to the likeliest token, so that nothing cancels if the policy is nearly deterministic.
    likeliest = np.argmax(log_probs, axis=1)[:, None]
    signal = signal - np.take_along_axis(signal, likeliest, axis=1)
    chances = np.exp(log_probs)
    return chances * (signal - (chances * signal).sum(axis=1, keepdims=True))


def future(
    environment: Environment, policy: np.ndarray, cost: np.ndarray, mean_cost: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the signal of later costs, Σ_t d_t(c)·E[Σ_{s>t} cost_s | c, v], and the expected visits Σ_t d_t.

    Args:
        environment: Environment with C contexts and V tokens.
        policy: Log-probs (C, V).
        cost: Cost (C, V) of a token in a context.
        mean_cost: Σ_v π·cost (C,), if it is known more exactly than by that sum.

    Returns:
        Signal (C, V) and visits (C, 1).
    """
    chances = np.exp(policy)
    mean_cost = np.einsum("cv,cv->c", chances, cost) if mean_cost is None else mean_cost
    if squared := powers(environment, chances):
        visited = _visited(environment, squared)[:, None]
        return visited * onward(environment, over_all_steps(squared, mean_cost, environment.horizon)[0]), visited
    values, signal, visited = mean_cost, np.zeros(cost.shape), np.zeros((len(cost), 1))
    states = backwards(lambda state: forward(environment, chances, state), start(environment), environment.horizon)
    for index, state in enumerate(states):
        visited += state
        if index > 0:
            later = onward(environment, values)
            values = mean_cost + np.einsum("cv,cv->c", chances, later)
            later *= state
            signal += later
    return signal, visited


def earlier(environment: Environment, log_probs: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return Σ_t E[1{c_t = c} Σ_{s<t} cost_s] (C, 1), under log-probs (C, V)."""
    chances, state = np.exp(log_probs), start(environment, moments=2)
    total = np.zeros((len(cost), 1))
    for _ in range(environment.horizon):
        total += state[:, 1:]
        state = carry(environment, chances, cost, state)
    return total


def lengths(environment: Environment, log_probs: np.ndarray) -> np.ndarray:
    """Return the probability (horizon,) of each length 1, 2, …, under log-probs (C, V)."""
    chances, ends, last = np.exp(log_probs), ending(environment), environment.horizon - 1
    found = np.zeros(environment.horizon)
    for step, visit in enumerate(visits(environment, chances)):
        found[step] = visit.sum() if step == last else visit @ (chances * ends).sum(axis=1)
    return found


def inverse_total(environment: Environment, log_probs: np.ndarray, rollouts: int) -> np.ndarray:
    """Return E[n/(l + L_2 + … + L_n)] (horizon,) for each length l of one of n independent rollouts."""
    total = np.ones(1)  # of the other rollouts' lengths: 0 for no other
    for _ in range(rollouts - 1):
        total = np.convolve(total, [0.0, *lengths(environment, log_probs)])
    own = np.arange(1, environment.horizon + 1)[:, None]
    return rollouts * (total / (own + np.arange(len(total)))).sum(axis=1)


def of_length(
    environment: Environment, log_probs: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the signal of w(L) − w(horizon), under log-probs (C, V): exactly zero where no rollout ends early.

    Args:
        environment: Environment with C contexts, V tokens and the longest length `horizon`.
        log_probs: Log-probs (C, V).
        weights: The function w (horizon,) of the lengths 1, 2, ….

    Returns:
        Signal (C, V), visits (C, 1), and E[w(L)].
    """
    chances, ends, horizon = np.exp(log_probs), ending(environment), environment.horizon
    values, signal, visited = np.zeros(len(chances)), np.zeros_like(chances), np.zeros((len(chances), 1))
    states = backwards(lambda state: forward(environment, chances, state), start(environment), horizon)
    for length, state in zip(range(horizon, 0, -1), states, strict=True):
        later = onward(environment, values)
        if length < horizon:
            later += ends * (weights[length - 1] - weights[-1])
        values = np.einsum("cv,cv->c", chances, later)
        signal += state * later
        visited += state
    return signal, visited, float(weights[-1] + environment.start_distribution() @ values)


def ends_here(environment: Environment, log_probs: np.ndarray) -> np.ndarray:
    """Return (C, V) probabilities that a token ends the rollout, times the visits of its context."""
    chance_of_last = np.zeros_like(log_probs)
    ends = ending(environment)
    for step, visit in enumerate(visits(environment, np.exp(log_probs))):
        chance_of_last += visit[:, None] * (ends if step < environment.horizon - 1 else 1.0)
    return chance_of_last
