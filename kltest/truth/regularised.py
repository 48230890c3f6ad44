"""The optimum of J = E_π[R] − β·KL(π‖ref), solved exactly for tabular policies."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kltest.environments import Environment
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.truth.recursions import onward


@dataclass(frozen=True)
class Optimum:
    """Log-probs of the optimal `policy`, (C, V) in a tree and else (T, C, V), and its `value` J*."""

    policy: np.ndarray
    value: float


def optimum(environment: Environment, reference: np.ndarray, beta: float) -> Optimum:
    """Return π* ∝ ref·exp(Q*/β) and J* = E[V*(first context)], V* = β·log E_ref[e^(Q*/β)], Q* = R + E[V*(next)].

    For one step this is π* ∝ ref·e^(R/β) and J* = β·log E_ref[e^(R/β)]. π* depends on time if contexts are shared
    between time steps.

    Args:
        environment: Environment with C contexts and V tokens.
        reference: Logits (C, V) of the reference.
        beta: Coefficient β of the KL.

    Raises:
        UsageError: β is not positive and finite.
        InvalidEnvironmentError: The reference has another shape or is not finite.
    """
    reference = checked(environment, reference, beta)

    def solve(action_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies = reference + action_values / beta
        return table(energies), beta * np.logaddexp.reduce(energies, axis=1)

    policy, first_values = solve_backwards(environment, reference, solve)
    return Optimum(policy, float(environment.start_distribution() @ first_values))


def checked(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """Return the reference's log-probs (C, V); raise as `optimum` for a bad β or reference."""
    if not (np.isfinite(beta) and beta > 0):
        raise UsageError(f"the coefficient β of the regularised objective must be positive and finite, not {beta}")
    shape = (environment.n_contexts, environment.vocabulary)
    if np.shape(reference) != shape:
        raise InvalidEnvironmentError(
            f"environment {environment.name!r}: the reference's logits must have shape {shape}, "
            f"not {np.shape(reference)}"
        )
    return table(reference, what="reference")


def reward_only(
    environment: Environment, reference: np.ndarray, beta: float, follow: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return the policy π = follow(ref, Q_R/β), with Q_R the action values of π for the reward alone."""
    reference = checked(environment, reference, beta)

    def solve(action_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        policy = follow(reference, action_values / beta)
        return policy, (np.exp(policy) * action_values).sum(axis=1)

    return solve_backwards(environment, reference, solve)[0]


def solve_backwards(
    environment: Environment,
    reference: np.ndarray,
    solve: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Solve the recursion Q_t = R + E[V_{t+1}], (policy_t, V_t) = solve(Q_t); return the policies and V_0 (C,).

    Policies are (T, C, V), or (C, V) in a tree, in which each context has one time step; contexts that are never
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
