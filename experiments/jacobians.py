"""Jacobians of named gradients. If one is not symmetric, the gradient is not that of any function.

With d_t(c) the probability of context c at time t, and r_t(c, ·) the row that one visit adds, a gradient is
Σ_t d_t·r_t. The rows' own derivatives are symmetric blocks; the rest is

    X = Σ_t ∂d_t(c)/∂θ ⊗ r_t(c, ·),    whole rollouts: X + Xᵀ,    prefixes held fixed: X alone,

since a local gradient ignores its effect on later contexts. ∂d_t is a recursion, without autograd or differences.
"""

from collections.abc import Iterable, Iterator
from itertools import repeat
from math import isqrt

import numpy as np

from kltest.environments import Environment, Instance
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.truth import divergences
from kltest.truth.recursions import from_signal, onward

# Bytes that one matrix of (C·V)² numbers may take.
MEMORY = 2**28
KNOWN = ("reverse_kl", "local_reverse_kl", "expected_reward")


def jacobian(name: str, instance: Instance) -> np.ndarray:
    """Return the derivatives of a named gradient with respect to the policy's logits.

    Args:
        name: `reverse_kl`, `local_reverse_kl` or `expected_reward`.
        instance: Environment and policies.

    Returns:
        Matrix (C·V, C·V), gradient entry c·V + v by rows and logit c'·V + v' by columns.

    Raises:
        UsageError: The name is another.
        InvalidEnvironmentError: The matrix does not fit into memory.
    """
    if name not in KNOWN:
        raise UsageError(f"the Jacobian of {name!r} is not known; those of {', '.join(KNOWN)} are")
    environment, policy = instance.environment, instance.policy
    contexts, vocabulary = policy.shape
    if 8 * policy.size**2 > MEMORY:
        raise InvalidEnvironmentError(
            f"environment {environment.name!r} has {contexts} contexts of {vocabulary} tokens; a Jacobian needs their "
            f"product squared, and at most {isqrt(MEMORY // 8)} logits fit. Use a smaller environment"
        )
    chances = np.exp(policy)
    own, crossed = np.zeros(policy.shape), np.zeros((contexts, vocabulary, policy.size))
    total = np.zeros(contexts)
    # Visits stop once every rollout has ended; the remaining rows are not needed.
    for row, (visit, sensitivity) in zip(_rows(name, instance, chances), _visits(environment, chances), strict=False):
        own += visit[:, None] * row
        crossed += sensitivity[:, None, :] * row[:, :, None]
        total += visit
    result = crossed.reshape(policy.size, policy.size)
    if name != "local_reverse_kl":
        result = result + result.T
    if name == "expected_reward":
        total[:] = 0.0  # the reward does not depend on the logits; a log-ratio does
    return result + _blocks(own, total, chances)


def next_contexts(environment: Environment) -> np.ndarray:
    """(C, V, C) probabilities of the next context after each context and token."""
    shape = environment.n_contexts, environment.vocabulary, environment.n_contexts
    return environment.transition.toarray().reshape(shape)


def asymmetry(matrix: np.ndarray) -> float:
    """Return ‖J − Jᵀ‖ / ‖J + Jᵀ‖: 0 for the gradient of a function, 1 if one side of the diagonal vanishes."""
    return float(np.linalg.norm(matrix - matrix.T) / np.linalg.norm(matrix + matrix.T))


def _rows(name: str, instance: Instance, chances: np.ndarray) -> Iterable[np.ndarray]:
    """Rows r_0, r_1, …: π·(Q_t − V_t), with the token's own cost as Q_t if prefixes are held fixed."""
    environment, policy = instance.environment, instance.policy
    if name == "expected_reward":
        cost = environment.reward
        mean = (chances * cost).sum(axis=1)
    else:
        cost, mean = policy - instance.reference, divergences.kl(policy, instance.reference)
    if name == "local_reverse_kl":
        return repeat(from_signal(cost, policy), environment.horizon)
    later = [np.zeros(len(policy))]
    for _ in range(environment.horizon - 1):
        later.append(mean + (chances * onward(environment, later[-1])).sum(axis=1))
    return (from_signal(cost + onward(environment, value), policy) for value in reversed(later))


def _visits(environment: Environment, chances: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """d_t (C,) and ∂d_t/∂θ (C, C·V) until the horizon, or until every rollout has ended."""
    contexts, vocabulary = chances.shape
    onwards = next_contexts(environment)
    step = np.einsum("cv,cvk->ck", chances, onwards)
    # Visits that one visit of a context adds to those after it, by each of its logits.
    spread = (chances[:, :, None] * (onwards - step[:, None, :])).reshape(chances.size, contexts).T
    visit, sensitivity = environment.start_distribution(), np.zeros((contexts, chances.size))
    for _ in range(environment.horizon):
        yield visit, sensitivity
        sensitivity = step.T @ sensitivity + spread * np.repeat(visit, vocabulary)
        visit = step.T @ visit
        if not visit.any():
            return


def _blocks(own: np.ndarray, visits: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """(C·V, C·V) derivatives of every context's row by its own logits: diag(r) − r·πᵀ − π·rᵀ + d·(diag(π) − π·πᵀ)."""
    contexts, vocabulary = chances.shape
    result = np.zeros((contexts, vocabulary, contexts, vocabulary))
    outer = own[:, :, None] * chances[:, None, :]
    block = -outer - outer.transpose(0, 2, 1) - visits[:, None, None] * chances[:, :, None] * chances[:, None, :]
    token = np.arange(vocabulary)
    block[:, token, token] += own + visits[:, None] * chances
    each = np.arange(contexts)
    result[each, :, each, :] = block
    return result.reshape(chances.size, chances.size)
