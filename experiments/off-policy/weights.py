"""Effective sample sizes of importance weights against length, by recursion over contexts: no rollout is drawn."""

from typing import Any

import numpy as np

from kltest.environments import Instance, ngram
from kltest.sweeps.store import digest

from .settings import BIGRAM

Row = dict[str, Any]


def of_weights(horizon: int, noise: float, seed: int) -> list[Row]:
    """A row for each of some lengths up to the horizon."""
    generator = np.random.default_rng(int(digest(["weights", seed])[:8], 16))
    vocabulary = int(BIGRAM["vocabulary"])
    shape = (vocabulary + 1, vocabulary)
    logits, direction = BIGRAM["policy"] * generator.standard_normal(shape), generator.standard_normal(shape)
    return shares(Instance.of(ngram(vocabulary, horizon), logits, logits, logits + noise * direction))


def shares(instance: Instance) -> list[Row]:
    """The effective share of N rollouts with weights w, E[w] = 1, is 1/E_μ[w²].

    For prefixes, and so for whole rollouts, E_μ[ρ_(1:t)²] is the sum over paths of Π π²/μ: powers of a matrix.
    """
    environment, policy, sampler = instance.environment, instance.policy, instance.sampler
    # In an environment of one token nothing follows; the recursion ends before it would matter where it leads.
    following = np.maximum(environment.successors[:, :, 0], 0)
    square = np.exp(2 * policy - sampler)
    growth, at_sampler_next, at_policy_next = (
        _step(following, weights) for weights in (square, np.exp(sampler), np.exp(policy))
    )
    divergence = (np.exp(policy) * (policy - sampler)).sum(axis=1)
    state, at_sampler, at_policy = (np.eye(len(policy))[0] for _ in range(3))
    logarithm = kl = tokens = prefixes = 0.0
    rows = []
    wanted = lengths(environment.horizon)
    for length in range(1, environment.horizon + 1):
        tokens += 1 / float(at_sampler @ square.sum(axis=1))
        kl += float(at_policy @ divergence)
        state, at_sampler, at_policy = state @ growth, at_sampler @ at_sampler_next, at_policy @ at_policy_next
        # Kept at size one: E[w²] itself leaves the range of a float.
        logarithm, state = logarithm + float(np.log(state.sum())), state / state.sum()
        prefixes += float(np.exp(-logarithm))
        if length in wanted:
            rows.append(
                {
                    "at": length,
                    "token_share": tokens / length,
                    "prefix_share": prefixes / length,
                    "log_sequence_share": -logarithm,
                    "kl_to_sampler": kl,
                    "off_enumerated": _off(instance, length, -logarithm),
                }
            )
    return rows


def _step(following: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(C, C) matrix of the summed weights of the tokens that lead from one context to another."""
    matrix = np.zeros((len(following), len(following)))
    for context, (contexts, weight) in enumerate(zip(following, weights, strict=True)):
        np.add.at(matrix[context], contexts, weight)
    return matrix


def lengths(horizon: int) -> list[int]:
    """1, 2, 3, 5, 10, 20, 30, 50, … and the horizon."""
    steps = {round(digit * 10.0**power) for power in range(6) for digit in (1, 2, 3, 5)}
    return sorted({length for length in steps if length < horizon} | {horizon})


def _off(instance: Instance, length: int, log_share: float) -> float | None:
    """Relative difference of the recursion from a sum over all rollouts; None if they are too many."""
    if length > BIGRAM["enumerated"]:
        return None
    short = Instance.of(ngram(instance.environment.vocabulary, length), *(instance.policy,) * 2, instance.sampler)
    policy, sampler = (short.paths.log_probability(who) for who in (short.policy, short.sampler))
    return abs(float(np.exp(2 * policy - sampler).sum()) * np.exp(log_share) - 1)
