"""The optimum of J = E_π[R] − β·KL(π‖ref), by the soft Bellman recursion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from kltest.environments import Environment
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.truth.recursions import onward


@dataclass(frozen=True)
class Optimum:
    """`policy`: log-probs (C, V) where a context belongs to one time step, else (T, C, V); `value`: J there."""

    policy: np.ndarray
    value: float


def optimum(environment: Environment, reference: np.ndarray, beta: float) -> Optimum:
    """π* ∝ ref·exp(Q*/β) and J* = E[V*(first context)], V* = β·log E_ref[e^(Q*/β)], Q* = R + E[V*(next)].

    `reference` (C, V) are logits. π* depends on time wherever contexts are shared between time steps. For one step
    this is π* ∝ ref·e^(R/β), J* = β log E_ref[e^(R/β)]. Raises UsageError unless β is positive and finite.
    """
    reference = check(environment, reference, beta)

    def solve(action_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies = reference + action_values / beta
        return table(energies), beta * logsumexp(energies, axis=1)

    policy, first_values = solve_backwards(environment, reference, solve)
    return Optimum(policy, float(environment.start_distribution() @ first_values))


def check(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """(C, V) the reference's log-probs; UsageError for a bad β or a table of the wrong shape."""
    if not (np.isfinite(beta) and beta > 0):
        raise UsageError(f"the coefficient β of the regularised objective must be positive and finite, not {beta}")
    shape = (environment.n_contexts, environment.vocabulary)
    if np.shape(reference) != shape:
        raise InvalidEnvironmentError(
            f"environment {environment.name!r}: the reference's logits must have shape {shape}, "
            f"not {np.shape(reference)}"
        )
    return table(reference, what="reference")


def solve_backwards(
    environment: Environment,
    reference: np.ndarray,
    solve: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Policies and first values of a recursion Q_t = R + E[V_{t+1}], (policy_t, V_t) = solve(Q_t).

    The policies are (T, C, V), or (C, V) in a tree, where each context has one time step; contexts that are never
    reached keep the reference there.
    """
    values, policies = np.zeros(environment.n_contexts), []
    for _ in range(environment.horizon):
        policy, values = solve(environment.reward + onward(environment, values))
        policies.append(policy)
    policies.reverse()
    if not environment.tree:
        return np.stack(policies), values
    merged = reference.copy()
    for reached, policy in zip(environment.reachable(), policies, strict=True):
        merged[reached] = policy[reached]
    return merged, values
