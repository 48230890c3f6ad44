"""Named gradients by dynamic programming: no autograd, and no enumeration except for the total variation of rollouts.

By the score-function theorem each is Σ_t E[g_t·Q_t], with Q_t(c, v) the expected cost that token v incurs. A *signal*
S(c, v) sums over time the visitation of c times Q_t(c, v), up to terms that do not depend on v. The gradient with
respect to the logits is then π·(S − Σ_v π·S), row by row: all time steps share one (C, V) table.
"""

from collections.abc import Callable, Mapping

import numpy as np

from kltest.environments import Environment, Instance
from kltest.environments.policies import softmax_gradient
from kltest.errors import InvalidEnvironmentError
from kltest.truth import divergences
from kltest.truth.atlas import canonical, named
from kltest.truth.recursions import backwards, ending, forward, onward, start, total_visits, visits


def gradient(name: str, instance: Instance) -> np.ndarray:
    """Return the named gradient by dynamic programming.

    Args:
        name: A name of the atlas.
        instance: Environment and policies.

    Returns:
        Gradient (C, V) with respect to the policy's logits.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: The result exceeds float64 or, for `total_variation`, there are too many rollouts to
            enumerate.
    """
    row = named(name)
    base, at_sampler = name.removesuffix("@sampler"), name.endswith("@sampler")
    with np.errstate(over="ignore", invalid="ignore"):
        if row.local:
            prefixes = instance.sampler if at_sampler else instance.policy
            visited = total_visits(instance.environment, prefixes)[:, None]
            result = visited * _NEXT_TOKEN[base](instance.policy, instance.reference)
        else:
            result = _WHOLE[base](instance)
    if not np.isfinite(result).all():
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
    environment, policy = instance.environment, instance.policy
    chance_of_last = np.zeros_like(policy)
    ends = ending(environment)
    for step, visit in enumerate(visits(environment, np.exp(policy))):
        chance_of_last += visit[:, None] * (ends if step < environment.horizon - 1 else 1.0)
    return from_signal(chance_of_last * (policy - instance.reference), policy)


def _cross_entropy(instance: Instance, target: np.ndarray) -> np.ndarray:
    """∇KL(target‖π) over whole rollouts: −E_target[Σ_t g_t]."""
    return total_visits(instance.environment, target)[:, None] * divergences.difference(instance.policy, target)


def _squared_log_ratio(instance: Instance) -> np.ndarray:
    """∇E_π[½U²]: with A the log-ratio before t and B from t on, what a token brings is B + A·B + ½B²."""
    environment, policy = instance.environment, instance.policy
    u, chances = policy - instance.reference, np.exp(policy)
    mean = divergences.kl(policy, instance.reference)

    def step(state: np.ndarray) -> np.ndarray:
        grown = forward(environment, chances, state)
        grown[:, 1:] += forward(environment, chances * u, state[:, :1])
        return grown

    first, second = np.zeros(len(policy)), np.zeros(len(policy))
    signal = np.zeros_like(policy)
    for state in backwards(step, start(environment, moments=2), environment.horizon):
        later, later_squared = onward(environment, first), onward(environment, second)
        square = u * u + 2 * u * later + later_squared
        signal += (state[:, :1] + state[:, 1:]) * (u + later) + 0.5 * state[:, :1] * square
        first = mean + np.einsum("cv,cv->c", chances, later)
        second = np.einsum("cv,cv->c", chances, square)
    return from_signal(signal, policy)


def _chi_square(instance: Instance) -> np.ndarray:
    """∇½χ² = E_π[e^U·Σ_t g_t]: the ratio so far, times the ratio from t on less 1."""
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
    return from_signal(signal, policy)


def _total_variation(instance: Instance) -> np.ndarray:
    """∇½Σ_y|π − ref| = ½E_π[sign(U)·Σ_t g_t]: signs do not factor over time, so all rollouts are visited."""
    paths = instance.paths
    log_ratio = np.where(paths.mask, (instance.policy - instance.reference)[paths.contexts, paths.tokens], 0.0)
    chance, sign = np.exp(paths.log_probability(instance.policy)), np.sign(log_ratio.sum(axis=1))
    # A constant for each prompt changes nothing but rounding; the likeliest rollout's leaves the least to cancel.
    for prompt in np.unique(paths.prompt):
        rows = np.flatnonzero(paths.prompt == prompt)
        sign[rows] -= sign[rows[np.argmax(chance[rows])]]
    weight = 0.5 * chance * sign
    policy = instance.policy
    cell = paths.contexts * policy.shape[1] + paths.tokens
    summed = np.bincount(cell.ravel(), (weight[:, None] * paths.mask).ravel(), policy.size)
    return softmax_gradient(summed.reshape(policy.shape), policy)


_WHOLE: dict[str, Callable[[Instance], np.ndarray]] = {
    "reverse_kl": lambda instance: _reverse_kl(instance, instance.reference),
    "future_reverse_kl": lambda instance: _reverse_kl(instance, instance.reference, now=0.0),
    "last_token_reverse_kl": _last_token,
    "forward_kl": lambda instance: _cross_entropy(instance, instance.reference),
    "squared_log_ratio": _squared_log_ratio,
    "squared_log_ratio_sum": lambda instance: _additive(
        instance, 0.5 * (instance.policy - instance.reference) ** 2, instance.policy - instance.reference
    ),
    "chi_square": _chi_square,
    "total_variation": _total_variation,
    "from_sampler_kl": lambda instance: _cross_entropy(instance, instance.sampler),
    "to_sampler_kl": lambda instance: _reverse_kl(instance, instance.sampler),
    "expected_reward": lambda instance: _additive(instance, instance.environment.reward),
    "entropy": lambda instance: _additive(instance, -instance.policy),
    "zero": lambda instance: np.zeros_like(instance.policy),
}

# The gradient of each next-token quantity with respect to the logits of its own row: (policy, reference) → (C, V).
_NEXT_TOKEN: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "local_reverse_kl": lambda policy, reference: from_signal(policy - reference, policy),
    "local_forward_kl": divergences.difference,
    "local_squared_log_ratio": lambda policy, reference: from_signal(
        (policy - reference) * (1 + 0.5 * (policy - reference)), policy
    ),
    "local_chi_square": lambda policy, reference: from_signal(np.expm1(policy - reference), policy),
    "local_total_variation": lambda policy, reference: from_signal(0.5 * np.sign(policy - reference), policy),
}
