"""Where gradient ascent on E[R] − β·(a KL estimator) comes to rest when the estimator's gradient is not the true one.

Tabular policies; each is solved exactly, and is a stationary point: the expected gradient that the estimator follows
vanishes there. The true gradient's own is `kltest.truth.optimum`.
"""

from __future__ import annotations

import numpy as np

from kltest.environments import Environment
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError
from kltest.truth.regularised import check, solve_backwards


def token_k2_fixed_point(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """π ∝ ref·exp(Q_R/β), Q_R the reward-only value of that same policy, solved backwards.

    For token k2 or the exact next-token KL as a loss: ∇E[R] = β·`local_reverse_kl`. `reference` (C, V) are logits;
    log-probs (C, V) in a tree, else (T, C, V).
    """
    reference = check(environment, reference, beta)

    def solve(action_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        policy = table(reference + action_values / beta)
        return policy, (np.exp(policy) * action_values).sum(axis=1)

    return solve_backwards(environment, reference, solve)[0]


def token_k3_fixed_point(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """π = β·ref/(β + V_R − Q_R), V_R and Q_R the reward-only values of that same policy, solved backwards.

    For token k3 as a loss: ∇E[R] = β·`local_forward_kl`. Exactly one such policy is positive everywhere. Shapes as
    for `token_k2_fixed_point`.
    """
    reference = check(environment, reference, beta)

    def solve(action_values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        policy = _hyperbolic(reference, action_values / beta)
        return policy, (np.exp(policy) * action_values).sum(axis=1)

    return solve_backwards(environment, reference, solve)[0]


def sequence_k3_fixed_point(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """π(y) = ref(y)/(1 − (R(y) − E_π[R])/β) for the rollouts y of each prompt, as (C, V) log-probs.

    For k3 of whole rollouts as a loss: ∇E[R] = β·`forward_kl`.

    Raises:
        InvalidEnvironmentError: Not every distribution over rollouts is a policy: contexts are shared, or chance
            decides where tokens lead.
    """
    reference = check(environment, reference, beta)
    deterministic = bool((environment.probabilities.max(axis=2) == 1.0).all())
    if not (environment.tree and deterministic):
        raise InvalidEnvironmentError(
            f"environment {environment.name!r}: the fixed point of a sequence-level k3 is known for token trees only "
            "(bandit, sequence, ragged), not where contexts are shared or dynamics are stochastic"
        )
    paths = environment.enumerate()
    log_reference, returns = paths.log_probability(reference) - paths.log_weight, environment.returns(paths)
    log_mass = np.zeros(len(paths))
    for prompt in np.unique(paths.prompt):
        rows = paths.prompt == prompt
        log_mass[rows] = _hyperbolic(log_reference[None, rows], returns[None, rows] / beta)[0]
    mass = np.zeros(reference.shape)
    live = paths.mask
    each = np.broadcast_to(np.exp(log_mass)[:, None], live.shape)[live]
    np.add.at(mass, (paths.contexts[live], paths.tokens[live]), each)
    reached = mass.sum(axis=1) > 0
    policy = reference.copy()
    policy[reached] = table(np.log(mass[reached]))
    return policy


def _hyperbolic(log_reference: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Log of the distribution ref/(λ − scores), row by row, with the λ above all scores for which it sums to 1.

    With V = Σ π·scores it follows that λ = 1 + V: the sum falls from ∞ to 0 as λ grows, so there is exactly one.
    """
    gap = scores.max(axis=1, keepdims=True) - scores
    # With δ = λ − max and F(δ) = Σ ref/(δ + gap): 1/F is concave and increasing, so Newton's
    # method on it climbs to the root of F = 1 from the left, where F ≥ ref(best)/δ = 1.
    best = np.take_along_axis(log_reference, np.argmax(scores, axis=1)[:, None], axis=1)
    weight, distance = np.exp(log_reference), np.maximum(np.exp(best), 1e-300)
    for _ in range(200):
        pole = weight / (distance + gap)
        total = pole.sum(axis=1, keepdims=True)
        stride = total * (total - 1.0) / (pole / (distance + gap)).sum(axis=1, keepdims=True)
        if (stride <= 1e-15 * distance).all():
            break
        distance = distance + stride
    return table(log_reference - np.log(distance + gap))
