"""Gradients on rollouts of the sampler, by the ratio in front of an estimator's terms, and sums over all rollouts.

With M(c, v) the expected weight of the score of token v in context c, summed over time, the gradient with respect to
the logits is M − π·Σ_v M. Weights of single tokens, and sums of them, are recursions over time; functions of a whole
rollout, and the mean ratio, are sums over all rollouts.
"""

from collections.abc import Callable

import numpy as np

from kltest.environments import Instance
from kltest.environments.policies import softmax_gradient
from kltest.errors import InvalidEnvironmentError
from kltest.truth import divergences
from kltest.truth.atlas import group_of, together
from kltest.truth.next_tokens import gradient_of_next_token, is_of_next_tokens
from kltest.truth.recursions import earlier, ends_here, from_signal, future, inverse_total, of_length
from kltest.truth.utilities import group_weight


def less_the_likeliest(values: np.ndarray, instance: Instance, chance: np.ndarray) -> np.ndarray:
    """Return values (N,) less that of the likeliest rollout of the same prompt.

    Where a constant for each prompt changes nothing but rounding, this one leaves the least to cancel.
    """
    prompt, values = instance.paths.prompt, values.copy()
    for each in np.unique(prompt):
        rows = np.flatnonzero(prompt == each)
        values[rows] -= values[rows[np.argmax(chance[rows])]]
    return values


def along(instance: Instance, table: np.ndarray) -> np.ndarray:
    """Return the entries (N, T) of a table (C, V) along every rollout, 0 at padding."""
    paths = instance.paths
    return np.where(paths.mask, table[paths.contexts, paths.tokens], 0.0)


def of_rollouts(instance: Instance, weights: np.ndarray) -> np.ndarray:
    """Return Σ_y Σ_t weights·g_t (C, V) over all rollouts, from weights (N, T) or (N, 1)."""
    paths, policy = instance.paths, instance.policy
    cell = paths.contexts * policy.shape[1] + paths.tokens
    summed = np.bincount(cell.ravel(), (weights * paths.mask).ravel(), policy.size)
    return softmax_gradient(summed.reshape(policy.shape), policy)


def _own_ratio(instance: Instance, base: str) -> np.ndarray:
    """E_μ[Σ_t ρ_t g_t (own_t + Σ_{s>t} cost_s)]: the token is π's, all others are μ's."""
    own, cost = _costs(instance, base)
    later, visited = future(instance.environment, instance.sampler, cost)
    return from_signal(later + visited * own, instance.policy)


def _no_ratio(instance: Instance, base: str) -> np.ndarray:
    """E_μ[Σ_t g_t·weight_t], with weights of a token, of a rollout, or summed over the tokens of a rollout."""
    environment, policy, sampler = instance.environment, instance.policy, instance.sampler
    if base in _OF_LOG_RATIO:
        chance = np.exp(instance.paths.log_probability(sampler))
        total = along(instance, policy - instance.reference).sum(axis=1)
        return of_rollouts(instance, (chance * _OF_LOG_RATIO[base](total, instance, chance))[:, None])
    if base == "last_token_reverse_kl":
        return softmax_gradient(
            np.exp(sampler) * ends_here(environment, sampler) * (policy - instance.reference), policy
        )
    if rollouts := together(base):
        weights = inverse_total(environment, sampler, rollouts)
        signal, visited, _ = of_length(environment, sampler, weights)
        return softmax_gradient(np.exp(sampler) * (signal + visited * weights[-1]), policy)
    own, cost = _costs(instance, base)
    later, visited = future(environment, sampler, cost)
    if base not in _WITHOUT_EARLIER:
        later += earlier(environment, sampler, cost)
    return softmax_gradient(np.exp(sampler) * (later + visited * own), policy)


def _mean_ratio(instance: Instance, base: str) -> np.ndarray:
    """E_μ[ρ̄ Σ_t g_t·weight_t]: ρ̄ depends on the length, so all rollouts are visited."""
    paths = instance.paths
    own, cost = (along(instance, table) for table in _costs(instance, base))
    log_ratio = along(instance, instance.policy - instance.sampler).sum(axis=1) / paths.lengths
    chance = np.exp(paths.log_probability(instance.sampler) + log_ratio)[:, None]
    return of_rollouts(instance, chance * (own - cost + cost.sum(axis=1, keepdims=True)))


def of_reward(instance: Instance, base: str, at: str) -> np.ndarray:
    """Gradient of the reward, or of a utility of the success rate, by the rollouts and ratios that `at` names.

    A rollout weighs its reward less the mean of its prompt, times U′ at the success rate of what draws the rollouts.

    Raises InvalidEnvironmentError if there are no success rates, since rewards are not 0 or 1.
    """
    environment, paths = instance.environment, instance.paths
    drawn = instance.sampler if at else instance.policy
    chance, reward = np.exp(paths.log_probability(drawn)), environment.returns(paths)
    weight = _centred(reward, instance, chance)
    if size := group_of(base):
        if not np.isin(reward, (0.0, 1.0)).all():
            raise InvalidEnvironmentError(
                f"environment {environment.name!r}: {base} is of success rates, and rewards are not 0 or 1 here"
            )
        slopes = [group_weight(rate, size, deviation=0) for rate in environment.expected_returns(drawn)]
        weight = weight * np.array(slopes)[paths.prompt]
    weights = (chance * weight)[:, None]
    if at == "sampler":
        weights = weights * np.exp(along(instance, instance.policy - drawn))
    return of_rollouts(instance, weights)


OFF_POLICY: dict[str, Callable[[Instance, str], np.ndarray]] = {
    "sampler": _own_ratio,
    "rollouts": _no_ratio,
    "mean_ratio": _mean_ratio,
}


def next_token(base: str, instance: Instance) -> np.ndarray:
    """Gradient (C, V) of each next-token quantity with respect to the logits of its own row."""
    policy, reference = instance.policy, instance.reference
    if is_of_next_tokens(base):
        return gradient_of_next_token(base, policy, reference)
    if base == "local_forward_kl":
        return divergences.difference(policy, reference)
    return from_signal(OF_OWN[base](policy, reference), policy)


def _costs(instance: Instance, base: str) -> tuple[np.ndarray, np.ndarray]:
    """Weight of a token's own score, and what the token adds to the weights of other scores, (C, V) each."""
    u = instance.policy - instance.reference
    nothing = np.zeros_like(u)
    if base in OF_OWN:
        return OF_OWN[base](instance.policy, instance.reference), nothing
    if base == "exact_future_reverse_kl":
        return nothing, nothing + divergences.kl(instance.policy, instance.reference)[:, None]
    return {
        "reverse_kl": (u, u),
        "future_reverse_kl": (nothing, u),
        "squared_log_ratio_sum": (u * (1 + 0.5 * u), 0.5 * u**2),
        "other_tokens_forward_kl": (nothing, -np.expm1(-u)),
        "to_sampler_kl": (instance.policy - instance.sampler,) * 2,
        "entropy": (-instance.policy,) * 2,
    }[base]


def _centred(total: np.ndarray, instance: Instance, chance: np.ndarray) -> np.ndarray:
    """Return a total (N,) less its mean over the rollouts of the same prompt."""
    prompt, total = instance.paths.prompt, less_the_likeliest(total, instance, chance)
    return total - (np.bincount(prompt, chance * total) / np.bincount(prompt, chance))[prompt]


_WITHOUT_EARLIER = frozenset({"future_reverse_kl", "exact_future_reverse_kl"})
# Weight of a score, by the log-probs of its token under policy and reference.
OF_OWN: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "local_reverse_kl": lambda policy, reference: policy - reference,
    "local_forward_kl": lambda policy, reference: -np.expm1(reference - policy),
    "local_squared_log_ratio": lambda policy, reference: (policy - reference) * (1 + 0.5 * (policy - reference)),
    "local_chi_square": lambda policy, reference: np.expm1(policy - reference),
    "local_total_variation": lambda policy, reference: 0.5 * np.sign(policy - reference),
    "local_entropy": lambda policy, reference: -policy,
}
# Weight of all scores of a rollout (N,), by its log-ratio; with the rollouts' probabilities for a mean.
_OF_LOG_RATIO: dict[str, Callable[[np.ndarray, Instance, np.ndarray], np.ndarray]] = {
    "forward_kl": lambda total, *_: -np.expm1(-total),
    "squared_log_ratio": lambda total, *_: total * (1 + 0.5 * total),
    "chi_square": lambda total, *_: np.expm1(total),
    "total_variation": lambda total, *_: 0.5 * np.sign(total),
    "centred_reverse_kl": _centred,
}
