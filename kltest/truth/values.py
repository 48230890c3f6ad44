"""Values of which the named gradients are gradients, and values that a loss may log as its KL.

`value` computes them by dynamic programming.
"""

from collections.abc import Callable, Mapping

import numpy as np

from kltest.environments import Instance
from kltest.errors import UsageError, did_you_mean
from kltest.truth import divergences
from kltest.truth.atlas import ATLAS
from kltest.truth.gradients import chi_square, finite, squared_log_ratio
from kltest.truth.recursions import carry, ending, inverse_total, of_length, start, total_visits

_LOGGED = {
    "kl": "KL(π‖ref) = E_π[Σ_t u_t]",
    "kl_per_token": "E_π[Σ_t u_t]/E_π[L]",
    "mean_of_token_means": "E_π[Σ_t u_t/L]",
    "expected_length": "E_π[L]",
}

VALUES: Mapping[str, str] = _LOGGED | {
    row.name: row.formula.replace("∇", "") for row in ATLAS.values() if "∇" in row.formula or row.name == "zero"
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
    base, at_sampler = known(name).removesuffix("@sampler"), name.endswith("@sampler")
    with np.errstate(over="ignore", invalid="ignore"):
        if base.startswith("local_"):
            result = _local(base, instance, instance.sampler if at_sampler else instance.policy)
        else:
            result = _BY_RECURSION[base](instance)
    return finite(result, name, instance)


def known(name: str) -> str:
    """Return the name of a value. Raises UsageError, with the nearest names, if there is none."""
    if name not in VALUES:
        hint = did_you_mean(name, VALUES) or f"the values are {', '.join(VALUES)}"
        raise UsageError(f"there is no value {name!r}; {hint.strip()}")
    return name


_NEXT_TOKEN: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "local_reverse_kl": divergences.kl,
    "local_forward_kl": lambda policy, reference: divergences.kl(reference, policy),
    "local_squared_log_ratio": lambda policy, reference: (np.exp(policy) * 0.5 * (policy - reference) ** 2).sum(axis=1),
    "local_chi_square": lambda policy, reference: 0.5 * divergences.chi_square(policy, reference),
    "local_total_variation": divergences.total_variation,
    "local_entropy": lambda policy, reference: -(np.exp(policy) * policy).sum(axis=1),
}
"""Each next-token quantity (C,), from tables of log-probs."""


def _local(name: str, instance: Instance, prefixes: np.ndarray) -> float:
    per_context = _NEXT_TOKEN[name](instance.policy, instance.reference)
    return float(total_visits(instance.environment, prefixes) @ per_context)


def _kl(instance: Instance, p: np.ndarray, q: np.ndarray) -> float:
    """KL of whole rollouts by the chain rule: next-token KLs, summed over the contexts that p visits."""
    return float(total_visits(instance.environment, p) @ divergences.kl(p, q))


def _mean(instance: Instance, cost: np.ndarray) -> float:
    return float(total_visits(instance.environment, instance.policy) @ (np.exp(instance.policy) * cost).sum(axis=1))


def _mean_of_token_means(instance: Instance) -> float:
    """E_π[Σ_t u_t/L]: the recursion carries visitation and summed log-ratio, divided by L where a rollout ends."""
    environment, chances = instance.environment, np.exp(instance.policy)
    u, ends, total = instance.policy - instance.reference, ending(instance.environment), 0.0
    state = start(environment, moments=2)
    for step in range(environment.horizon):
        stops = chances * (ends if step < environment.horizon - 1 else 1.0)
        total += float((stops * (state[:, 1:] + state[:, :1] * u)).sum()) / (step + 1)
        state = carry(environment, chances, u, state)
    return total


def _length(instance: Instance) -> float:
    return float(total_visits(instance.environment, instance.policy).sum())


def _total_variation(instance: Instance) -> float:
    policy, reference = (np.exp(instance.paths.log_probability(p)) for p in (instance.policy, instance.reference))
    return 0.5 * float(np.abs(policy - reference).sum())


_BY_RECURSION: dict[str, Callable[[Instance], float]] = {
    "kl": lambda instance: _kl(instance, instance.policy, instance.reference),
    "reverse_kl": lambda instance: _kl(instance, instance.policy, instance.reference),
    "forward_kl": lambda instance: _kl(instance, instance.reference, instance.policy),
    "from_sampler_kl": lambda instance: _kl(instance, instance.sampler, instance.policy),
    "to_sampler_kl": lambda instance: _kl(instance, instance.policy, instance.sampler),
    "kl_per_token": lambda instance: _kl(instance, instance.policy, instance.reference) / _length(instance),
    "mean_of_token_means": _mean_of_token_means,
    "expected_length": _length,
    "squared_log_ratio": lambda instance: squared_log_ratio(instance)[1],
    "squared_log_ratio_sum": lambda instance: _local("local_squared_log_ratio", instance, instance.policy),
    "chi_square": lambda instance: chi_square(instance)[1],
    "total_variation": _total_variation,
    "expected_reward": lambda instance: _mean(instance, instance.environment.reward),
    "entropy": lambda instance: _mean(instance, -instance.policy),
    "inverse_length": lambda instance: of_length(
        instance.environment, instance.policy, inverse_total(instance.environment, instance.policy, 1)
    )[2],
    "zero": lambda instance: 0.0,
}
