"""A world with its three policies: everything about which an exact question can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kltest.environments.environment import END, Environment
from kltest.environments.paths import Paths
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError


@dataclass(frozen=True, eq=False)
class Instance:
    """`policy`, `reference` and `sampler` are (C, V) tables of log-probs (`Instance.of` takes logits)."""

    environment: Environment
    policy: np.ndarray
    reference: np.ndarray
    sampler: np.ndarray

    @classmethod
    def of(
        cls,
        environment: Environment,
        policy: np.ndarray,
        reference: np.ndarray,
        sampler: np.ndarray | None = None,
    ) -> Instance:
        """From tables of logits; without a sampler, rollouts come from the policy."""
        shape = (environment.n_contexts, environment.vocabulary)
        named = {"policy": policy, "reference": reference, "sampler": policy if sampler is None else sampler}
        for what, logits in named.items():
            if np.shape(logits) != shape:
                raise InvalidEnvironmentError(
                    f"environment {environment.name!r} has {shape[0]} contexts and {shape[1]} tokens; "
                    f"the {what}'s logits have shape {np.shape(logits)}"
                )
        return cls(environment, *(table(logits, what=what) for what, logits in named.items()))

    @classmethod
    def draw(
        cls,
        environment: Environment,
        seed: int | np.random.SeedSequence,
        *,
        distance: float = 2.0,
        staleness: float = 1.0,
    ) -> Instance:
        """Random policies, mild: along every rollout |Σ log π/ref| < `distance` and |Σ log π/μ| < `staleness`."""
        generator = np.random.default_rng(seed)
        shape = (environment.n_contexts, environment.vocabulary)
        policy = table(0.7 * generator.standard_normal(shape))
        reference = _near(environment, policy, generator.standard_normal(shape), distance)
        sampler = _near(environment, policy, generator.standard_normal(shape), staleness)
        return cls(environment, policy, reference, sampler)

    @cached_property
    def paths(self) -> Paths:
        """Every rollout, enumerated once."""
        return self.environment.enumerate()

    def rollout_weights(self, sampler: str, paths: Paths | None = None) -> np.ndarray:
        """(N,) probability of each rollout under the policy ("current") or the sampler ("stale")."""
        paths = self.paths if paths is None else paths
        return np.exp(paths.log_probability(self.behaviour(sampler)))

    def behaviour(self, sampler: str) -> np.ndarray:
        """(C, V) log-probs from which rollouts are drawn: the policy's ("current") or the sampler's ("stale")."""
        return {"current": self.policy, "stale": self.sampler}[sampler]


def _near(environment: Environment, policy: np.ndarray, direction: np.ndarray, bound: float) -> np.ndarray:
    """A policy off in a random direction, by 0.5 to 0.9 of the bound on the summed log-ratio of any rollout."""
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        other = table(policy + middle * direction)
        furthest = largest_sum(environment, np.abs(policy - other))
        if 0.5 * bound < furthest < 0.9 * bound:
            return other
        low, high = (middle, high) if furthest <= 0.5 * bound else (low, middle)
    return table(policy + low * direction)


def largest_sum(environment: Environment, cost: np.ndarray) -> float:
    """The largest sum of a (C, V) cost along any rollout."""
    goes_on = (environment.successors != END) & (environment.probabilities > 0)
    best = np.zeros(environment.n_contexts)
    for _ in range(environment.horizon):
        onward = np.where(goes_on, best[np.where(goes_on, environment.successors, 0)], 0.0).max(axis=2)
        updated = (cost + onward).max(axis=1)
        if np.array_equal(updated, best):
            break
        best = updated
    return float(best[environment.start].max())
