"""Named gradients by dynamic programming, without autograd; only functions of whole rollouts are enumerated.

By the score-function theorem each is Σ_t E[g_t·Q_t], with Q_t(c, v) the expected cost that token v incurs. A *signal*
S(c, v) sums over time the visitation of c times Q_t(c, v), up to terms that do not depend on v. The gradient with
respect to the logits is then π·(S − Σ_v π·S), row by row: all time steps share one (C, V) table.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kltest.environments import Instance
from kltest.errors import InvalidEnvironmentError
from kltest.truth import divergences
from kltest.truth.atlas import MixtureName, canonical, group_of, mixture_named, named, together, towards_sampler
from kltest.truth.next_tokens import is_of_next_tokens, of_mixture
from kltest.truth.off_policy import OF_OWN, OFF_POLICY, along, less_the_likeliest, next_token, of_reward, of_rollouts
from kltest.truth.recursions import (
    backwards,
    carry,
    ends_here,
    forward,
    from_signal,
    future,
    inverse_total,
    of_length,
    onward,
    start,
    total_visits,
    visits,
)

Result = TypeVar("Result", np.ndarray, float)


def gradient(name: str, instance: Instance) -> np.ndarray:
    """Return the named gradient by dynamic programming.

    Args:
        name: A name of the atlas.
        instance: Environment and policies.

    Returns:
        Gradient (C, V) with respect to the policy's logits.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: The result exceeds float64, or there are too many rollouts to enumerate, as
            `total_variation`, mixtures of whole rollouts, `…@mean_ratio` and some of `…@rollouts` need.
    """
    base, _, at = named(name).name.partition("@")
    if base != "to_sampler_kl" and (other := towards_sampler(base)):
        return gradient(f"{other}@{at}" if at else other, replace(instance, reference=instance.sampler))
    with np.errstate(over="ignore", invalid="ignore"):
        if at in ("", "sampler") and (base in OF_OWN or is_of_next_tokens(base)):
            prefixes = instance.sampler if at else instance.policy
            result = total_visits(instance.environment, prefixes)[:, None] * next_token(base, instance)
        elif group_of(base) or (at and base == "expected_reward"):
            result = of_reward(instance, base, at)
        elif at:
            result = OFF_POLICY[at](instance, base)
        elif rollouts := together(base):
            weights = inverse_total(instance.environment, instance.policy, rollouts)
            result = from_signal(of_length(instance.environment, instance.policy, weights)[0], instance.policy)
        elif (mixture := mixture_named(base)) is not None:
            result = _from_mixture(instance, mixture)
        else:
            result = _WHOLE[base](instance)
    return finite(result, name, instance)


def finite(result: Result, name: str, instance: Instance) -> Result:
    """Return a gradient or a value; raise InvalidEnvironmentError if it exceeds float64."""
    if not np.all(np.isfinite(result)):
        raise InvalidEnvironmentError(
            f"environment {instance.environment.name!r}: {name} exceeds the range of float64 (1.8e308) here; "
            "the policies are too far apart for it"
        )
    return result


def combine(combination: Mapping[str, float], instance: Instance) -> np.ndarray:
    """Return Σ c·gradient(name, instance) (C, V) with respect to the policy's logits.

    Raises:
        UsageError: A name is unknown or a coefficient is not finite.
        InvalidEnvironmentError: As `gradient`.
    """
    return sum(coefficient * gradient(name, instance) for name, coefficient in canonical(combination).items())  # type: ignore[return-value]


def credit_pairs(instance: Instance) -> dict[tuple[int, int], np.ndarray]:
    """Return E_π[g_t u_s] for each pair of positions, with g_t the score of token t and u_s the log-ratio of token s.

    All pairs together sum to `reverse_kl`, those with t = s to `local_reverse_kl`, the others to `future_reverse_kl`.
    For t > s the expectation is zero: earlier log-ratios do not depend on a later token.

    Returns:
        {(t, s): gradient (C, V) with respect to the policy's logits} for 0 ≤ t ≤ s < horizon; pairs beyond the end of
        every rollout may be missing.
    """
    environment, policy = instance.environment, instance.policy
    chances, log_ratio = np.exp(policy), policy - instance.reference
    brought = [log_ratio]  # expected log-ratio after 0, 1, … further steps
    for _ in range(environment.horizon - 1):
        brought.append(onward(environment, (chances * brought[-1]).sum(axis=1)))
    return {
        (t, t + lag): from_signal(visit[:, None] * brought[lag], policy)
        for t, visit in enumerate(visits(environment, chances))
        for lag in range(environment.horizon - t)
    }


def _reverse_kl(instance: Instance, towards: np.ndarray, *, now: float = 1.0) -> np.ndarray:
    """`now` weights the token's own log-ratio against those that follow."""
    policy = instance.policy
    log_ratio = policy - towards
    later, visited = future(instance.environment, policy, log_ratio, divergences.kl(policy, towards))
    return from_signal(later + now * visited * log_ratio, policy)


def _additive(instance: Instance, cost: np.ndarray, own: np.ndarray | float = 0.0) -> np.ndarray:
    """∇E_π[Σ_t cost_t]; `own` (C, V) is the cost's own derivative with respect to log π."""
    later, visited = future(instance.environment, instance.policy, cost)
    return from_signal(later + visited * (cost + own), instance.policy)


def _last_token(instance: Instance) -> np.ndarray:
    return from_signal(
        ends_here(instance.environment, instance.policy) * (instance.policy - instance.reference), instance.policy
    )


def _cross_entropy(instance: Instance, target: np.ndarray) -> np.ndarray:
    """∇KL(target‖π) over whole rollouts: −E_target[Σ_t g_t]."""
    return total_visits(instance.environment, target)[:, None] * divergences.difference(instance.policy, target)


def squared_log_ratio(instance: Instance) -> tuple[np.ndarray, float]:
    """Gradient and value of E_π[½U²]: with A the log-ratio before t and B from t on, a token brings B + A·B + ½B²."""
    environment, policy = instance.environment, instance.policy
    u, chances = policy - instance.reference, np.exp(policy)
    mean = divergences.kl(policy, instance.reference)
    first, second = np.zeros(len(policy)), np.zeros(len(policy))
    signal = np.zeros_like(policy)
    states = backwards(
        lambda state: carry(environment, chances, u, state), start(environment, moments=2), environment.horizon
    )
    for state in states:
        later, later_squared = onward(environment, first), onward(environment, second)
        square = u * u + 2 * u * later + later_squared
        signal += (state[:, :1] + state[:, 1:]) * (u + later) + 0.5 * state[:, :1] * square
        first = mean + np.einsum("cv,cv->c", chances, later)
        second = np.einsum("cv,cv->c", chances, square)
    return from_signal(signal, policy), float(0.5 * environment.start_distribution() @ second)


def chi_square(instance: Instance) -> tuple[np.ndarray, float]:
    """Gradient and value of ½χ²; ∇½χ² = E_π[e^U·Σ_t g_t]: the ratio so far, times the ratio from t on less 1."""
    environment, policy = instance.environment, instance.policy
    u = policy - instance.reference
    tilted = np.exp(policy + u)
    mean = divergences.chi_square(policy, instance.reference)
    beyond = np.zeros(len(policy))
    signal = np.zeros_like(policy)
    for state in backwards(lambda state: forward(environment, tilted, state), start(environment), environment.horizon):
        later = onward(environment, beyond)
        signal += state * (np.expm1(u) + np.exp(u) * later)
        beyond = mean + np.einsum("cv,cv->c", tilted, later)
    return from_signal(signal, policy), float(0.5 * environment.start_distribution() @ beyond)


def _total_variation(instance: Instance) -> np.ndarray:
    """∇½Σ_y|π − ref| = ½E_π[sign(U)·Σ_t g_t]: signs do not factor over time, so all rollouts are visited."""
    return _of_whole(instance, lambda policy, reference: 0.5 * np.sign(policy - reference))


def _from_mixture(instance: Instance, mixture: MixtureName) -> np.ndarray:
    return _of_whole(instance, lambda policy, reference: of_mixture(mixture, policy, reference))


def _of_whole(instance: Instance, weight: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """E_π[weight·Σ_t g_t], with a weight (N,) of the log-probs of each rollout under policy and reference."""
    chance = np.exp(instance.paths.log_probability(instance.policy))
    totals = (along(instance, table).sum(axis=1) for table in (instance.policy, instance.reference))
    return of_rollouts(instance, (chance * less_the_likeliest(weight(*totals), instance, chance))[:, None])


_WHOLE: dict[str, Callable[[Instance], np.ndarray]] = {
    "reverse_kl": lambda instance: _reverse_kl(instance, instance.reference),
    "future_reverse_kl": lambda instance: _reverse_kl(instance, instance.reference, now=0.0),
    "last_token_reverse_kl": _last_token,
    "forward_kl": lambda instance: _cross_entropy(instance, instance.reference),
    "squared_log_ratio": lambda instance: squared_log_ratio(instance)[0],
    "squared_log_ratio_sum": lambda instance: _additive(
        instance, 0.5 * (instance.policy - instance.reference) ** 2, instance.policy - instance.reference
    ),
    "chi_square": lambda instance: chi_square(instance)[0],
    "total_variation": _total_variation,
    "from_sampler_kl": lambda instance: _cross_entropy(instance, instance.sampler),
    "to_sampler_kl": lambda instance: _reverse_kl(instance, instance.sampler),
    "expected_reward": lambda instance: _additive(instance, instance.environment.reward),
    "entropy": lambda instance: _additive(instance, -instance.policy),
    "zero": lambda instance: np.zeros_like(instance.policy),
}
