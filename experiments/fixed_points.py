"""Fixed points of gradients that are not those of J = E_π[R] − β·KL(π‖ref), solved exactly for tabular policies.

A fixed point is a policy at which the expected gradient of E[R] − β·(a KL estimator) vanishes, the gradient being the
one that the estimator follows.
"""

import numpy as np

from kltest.environments import Environment
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError
from kltest.truth.regularised import checked, reward_only


def token_k3_fixed_point(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """Return π = β·ref/(β + V_R − Q_R), with V_R and Q_R the values of π for the reward alone, solved backwards.

    It is the fixed point of token-level k3 as a loss: ∇E[R] = β·`local_forward_kl`. Exactly one such policy is positive
    everywhere. Arguments, result and errors are those of `kltest.truth.token_level_fixed_point`.
    """
    return reward_only(environment, reference, beta, _hyperbolic)


def sequence_k3_fixed_point(environment: Environment, reference: np.ndarray, beta: float) -> np.ndarray:
    """Return π(y) = ref(y)/(1 − (R(y) − E_π[R])/β) for the rollouts y of each prompt, as log-probs (C, V).

    It is the fixed point of sequence-level k3 as a loss: ∇E[R] = β·`forward_kl`. Arguments are those of
    `kltest.truth.token_level_fixed_point`.

    Raises:
        UsageError: β is not positive and finite.
        InvalidEnvironmentError: Some distribution over rollouts is no policy, since contexts are shared or dynamics
            are stochastic; or there are too many rollouts to enumerate.
    """
    reference = checked(environment, reference, beta)
    deterministic = bool((environment.probabilities.max(axis=2) == 1.0).all())
    if not (environment.tree and deterministic):
        raise InvalidEnvironmentError(
            f"environment {environment.name!r}: the fixed point of a sequence-level k3 is known for token trees only "
            "(bandit, sequence, ragged), not if contexts are shared or dynamics are stochastic"
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
    """Log of the distribution ref/(λ − scores), row by row, with λ above all scores such that it sums to 1.

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
