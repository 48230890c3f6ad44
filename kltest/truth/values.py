"""Values of which the named gradients are gradients, and values that a loss may log as its KL.

Each is computed in two ways: `value` by dynamic programming, `value_again` as a plain sum over all rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kltest.environments import Instance
from kltest.errors import InvalidEnvironmentError, UsageError, did_you_mean
from kltest.truth import divergences
from kltest.truth.atlas import ATLAS
from kltest.truth.recursions import ending, forward, onward, start, total_visits, visits

_LOGGED = {
    "kl": "KL(π‖ref) = E_π[Σ_t u_t]",
    "kl_per_token": "E_π[Σ_t u_t]/E_π[L]",
    "mean_of_token_means": "E_π[Σ_t u_t/L]",
    "expected_length": "E_π[L]",
}

VALUES: Mapping[str, str] = _LOGGED | {
    row.name: row.formula.replace("∇", "")
    for row in ATLAS.values()
    if row.name not in ("future_reverse_kl", "last_token_reverse_kl")
}
"""Formula of every value by name: those that the atlas differentiates, and those that losses log."""


def value(name: str, instance: Instance) -> float:
    """Return a value, in nats for a KL or entropy, by dynamic programming; only `total_variation` enumerates.

    Args:
        name: A name of `VALUES`.
        instance: Environment and policies.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: The result exceeds float64.
    """
    return _answer(name, instance, _BY_RECURSION, _local)


def value_again(name: str, instance: Instance) -> float:
    """Return a value as a sum over all rollouts; shares no recursion with `value`.

    Args:
        name: A name of `VALUES`.
        instance: Environment and policies.

    Raises:
        UsageError: The name is unknown.
        InvalidEnvironmentError: The result exceeds float64, or there are too many rollouts to enumerate.
    """
    return _answer(name, instance, _BY_ENUMERATION, _local_again)


def _answer(
    name: str,
    instance: Instance,
    whole: Mapping[str, Callable[[Instance], float]],
    local: Callable[[str, Instance, np.ndarray], float],
) -> float:
    if name not in VALUES:
        hint = did_you_mean(name, VALUES) or f"the values are {', '.join(VALUES)}"
        raise UsageError(f"there is no value {name!r}; {hint.strip()}")
    base, at_sampler = name.removesuffix("@sampler"), name.endswith("@sampler")
    with np.errstate(over="ignore", invalid="ignore"):
        if base.startswith("local_"):
            result = local(base, instance, instance.sampler if at_sampler else instance.policy)
        else:
            result = whole[base](instance)
    if not np.isfinite(result):
        raise InvalidEnvironmentError(
            f"environment {instance.environment.name!r}: {name} exceeds the range of float64 here"
        )
    return float(result)


def _squared(policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return (np.exp(policy) * 0.5 * (policy - reference) ** 2).sum(axis=1)


def _local(name: str, instance: Instance, prefixes: np.ndarray) -> float:
    policy, reference = instance.policy, instance.reference
    per_context = {
        "local_reverse_kl": lambda: divergences.kl(policy, reference),
        "local_forward_kl": lambda: divergences.kl(reference, policy),
        "local_squared_log_ratio": lambda: _squared(policy, reference),
        "local_chi_square": lambda: 0.5 * divergences.chi_square(policy, reference),
        "local_total_variation": lambda: divergences.total_variation(policy, reference),
    }[name]()
    return float(total_visits(instance.environment, prefixes) @ per_context)


def _kl(instance: Instance, p: np.ndarray, q: np.ndarray) -> float:
    """KL of whole rollouts by the chain rule: next-token KLs, summed over the contexts that p visits."""
    return float(total_visits(instance.environment, p) @ divergences.kl(p, q))


def _mean(instance: Instance, cost: np.ndarray) -> float:
    return float(total_visits(instance.environment, instance.policy) @ (np.exp(instance.policy) * cost).sum(axis=1))


def _squared_log_ratio(instance: Instance) -> float:
    environment, chances = instance.environment, np.exp(instance.policy)
    u = instance.policy - instance.reference
    mean = divergences.kl(instance.policy, instance.reference)
    first = second = np.zeros(environment.n_contexts)
    for _ in range(environment.horizon):
        later = onward(environment, first)
        square = u * u + 2 * u * later + onward(environment, second)
        first, second = mean + (chances * later).sum(axis=1), (chances * square).sum(axis=1)
    return float(0.5 * environment.start_distribution() @ second)


def _chi_square(instance: Instance) -> float:
    environment = instance.environment
    tilted = np.exp(2 * instance.policy - instance.reference)
    mean = divergences.chi_square(instance.policy, instance.reference)
    beyond = np.zeros(environment.n_contexts)
    for _ in range(environment.horizon):
        beyond = mean + (tilted * onward(environment, beyond)).sum(axis=1)
    return float(0.5 * environment.start_distribution() @ beyond)


def _mean_of_token_means(instance: Instance) -> float:
    """E_π[Σ_t u_t/L]: the recursion carries visitation and summed log-ratio, divided by L where a rollout ends."""
    environment, chances = instance.environment, np.exp(instance.policy)
    u, ends, total = instance.policy - instance.reference, ending(instance.environment), 0.0
    state = start(environment, moments=2)
    for step in range(environment.horizon):
        stops = chances * (ends if step < environment.horizon - 1 else 1.0)
        total += float((stops * (state[:, 1:] + state[:, :1] * u)).sum()) / (step + 1)
        grown = forward(environment, chances, state)
        grown[:, 1:] += forward(environment, chances * u, state[:, :1])
        state = grown
    return total


def _length(instance: Instance) -> float:
    return float(sum(visit.sum() for visit in visits(instance.environment, np.exp(instance.policy))))


_BY_RECURSION: dict[str, Callable[[Instance], float]] = {
    "kl": lambda instance: _kl(instance, instance.policy, instance.reference),
    "reverse_kl": lambda instance: _kl(instance, instance.policy, instance.reference),
    "forward_kl": lambda instance: _kl(instance, instance.reference, instance.policy),
    "from_sampler_kl": lambda instance: _kl(instance, instance.sampler, instance.policy),
    "to_sampler_kl": lambda instance: _kl(instance, instance.policy, instance.sampler),
    "kl_per_token": lambda instance: _kl(instance, instance.policy, instance.reference) / _length(instance),
    "mean_of_token_means": _mean_of_token_means,
    "expected_length": _length,
    "squared_log_ratio": _squared_log_ratio,
    "squared_log_ratio_sum": lambda instance: _local("local_squared_log_ratio", instance, instance.policy),
    "chi_square": _chi_square,
    "total_variation": lambda instance: 0.5 * float(np.abs(_both(instance)[0] - _both(instance)[1]).sum()),
    "expected_reward": lambda instance: _mean(instance, instance.environment.reward),
    "entropy": lambda instance: _mean(instance, -instance.policy),
    "zero": lambda instance: 0.0,
}


def _both(instance: Instance) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (N,) of all rollouts under the policy and under the reference."""
    paths = instance.paths
    return np.exp(paths.log_probability(instance.policy)), np.exp(paths.log_probability(instance.reference))


def _sums(instance: Instance, per_token: np.ndarray) -> np.ndarray:
    """Sums (N,) of a (C, V) table along each rollout."""
    paths = instance.paths
    return np.where(paths.mask, per_token[paths.contexts, paths.tokens], 0.0).sum(axis=1)


def _under(instance: Instance, log_probs: np.ndarray, per_rollout: np.ndarray) -> float:
    return float(np.exp(instance.paths.log_probability(log_probs)) @ per_rollout)


def _kl_again(instance: Instance, p: np.ndarray, q: np.ndarray) -> float:
    return _under(instance, p, _sums(instance, p - q))


def _per_rollout(instance: Instance, per_token: np.ndarray) -> float:
    return _under(instance, instance.policy, _sums(instance, per_token))


def _local_again(name: str, instance: Instance, prefixes: np.ndarray) -> float:
    """Mean over the tokens of rollouts drawn with log-probs `prefixes`, each weighted by its importance ratio."""
    policy, reference = instance.policy, instance.reference
    u, ratio = policy - reference, np.exp(policy - prefixes)
    per_token = {
        "local_reverse_kl": lambda: ratio * u,
        "local_forward_kl": lambda: -np.exp(reference - prefixes) * u,
        "local_squared_log_ratio": lambda: ratio * 0.5 * u * u,
        "local_chi_square": lambda: 0.5 * ratio * (np.exp(u) - 1),
        "local_total_variation": lambda: 0.5 * ratio * np.abs(1 - np.exp(-u)),
    }[name]()
    return _under(instance, prefixes, _sums(instance, per_token))


def _log_ratio(instance: Instance) -> np.ndarray:
    return instance.policy - instance.reference


_BY_ENUMERATION: dict[str, Callable[[Instance], float]] = {
    "kl": lambda instance: _kl_again(instance, instance.policy, instance.reference),
    "reverse_kl": lambda instance: _kl_again(instance, instance.policy, instance.reference),
    "forward_kl": lambda instance: _kl_again(instance, instance.reference, instance.policy),
    "from_sampler_kl": lambda instance: _kl_again(instance, instance.sampler, instance.policy),
    "to_sampler_kl": lambda instance: _kl_again(instance, instance.policy, instance.sampler),
    "kl_per_token": lambda instance: (
        _per_rollout(instance, _log_ratio(instance)) / _per_rollout(instance, np.ones_like(instance.policy))
    ),
    "mean_of_token_means": lambda instance: _under(
        instance, instance.policy, _sums(instance, _log_ratio(instance)) / instance.paths.mask.sum(axis=1)
    ),
    "expected_length": lambda instance: _under(instance, instance.policy, instance.paths.mask.sum(axis=1)),
    "squared_log_ratio": lambda instance: _under(
        instance, instance.policy, 0.5 * _sums(instance, _log_ratio(instance)) ** 2
    ),
    "squared_log_ratio_sum": lambda instance: _per_rollout(instance, 0.5 * _log_ratio(instance) ** 2),
    "chi_square": lambda instance: _under(
        instance, instance.policy, 0.5 * np.expm1(_sums(instance, _log_ratio(instance)))
    ),
    "total_variation": lambda instance: 1.0 - float(np.minimum(*_both(instance)).sum()),
    "expected_reward": lambda instance: _under(instance, instance.policy, instance.environment.returns(instance.paths)),
    "entropy": lambda instance: _per_rollout(instance, -instance.policy),
    "zero": lambda instance: 0.0,
}
