"""Instances: an environment with a policy, a reference and a sampler."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kltest.environments.environment import END, Environment
from kltest.environments.paths import Paths
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError


@dataclass(frozen=True, eq=False)
class Instance:
    """An environment with (C, V) tables of log-probs of policy, reference and sampler (`Instance.of` takes logits).

    Attributes:
        environment: The environment.
        policy: π.
        reference: ref.
        sampler: μ, which draws the rollouts unless the policy does.
        trainer: What the trainer computes for the sampler and calls `old_logp`, if that is not μ.
        engine: What the engine tells of the tokens that it drew, `rollout_logp`, if that is not μ.
    """

    environment: Environment
    policy: np.ndarray
    reference: np.ndarray
    sampler: np.ndarray
    trainer: np.ndarray | None = None
    engine: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        environment: Environment,
        policy: np.ndarray,
        reference: np.ndarray,
        sampler: np.ndarray | None = None,
    ) -> "Instance":
        """Build an instance from logits.

        Args:
            environment: Environment with C contexts and V tokens.
            policy: Logits (C, V) of the policy.
            reference: Logits (C, V) of the reference.
            sampler: Logits (C, V) of the sampler (default: the policy's).

        Raises:
            InvalidEnvironmentError: Logits have another shape or are not finite.
        """
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
    ) -> "Instance":
        """Draw three random policies that are close to each other.

        Args:
            environment: Environment of the instance.
            seed: Seed of all three policies.
            distance: Bound on |Σ log π/ref| along every rollout, in nats.
            staleness: Bound on |Σ log π/μ| along every rollout, in nats, with μ the sampler.
        """
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

    def rollout_weights(self, sampler: str) -> np.ndarray:
        """Return the probability (N,) of each rollout under the policy ("current") or the sampler (any other name)."""
        return np.exp(self.paths.log_probability(self.behaviour(sampler)))

    def behaviour(self, sampler: str) -> np.ndarray:
        """Return the log-probs (C, V) that rollouts are drawn from: the policy's ("current") or the sampler's."""
        return self.policy if sampler == "current" else self.sampler

    def recomputed(self, sampler: str) -> np.ndarray:
        """Return the log-probs (C, V) that the trainer takes for the sampler's: `old_logp`."""
        return self.behaviour(sampler) if sampler == "current" or self.trainer is None else self.trainer

    def of_all(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient (C, V) of all rollouts from that of those that are enumerated."""
        return gradient

    def told(self, sampler: str) -> np.ndarray:
        """Return the log-probs (C, V) that come with the rollouts: `rollout_logp`."""
        return self.behaviour(sampler) if sampler == "current" or self.engine is None else self.engine


@dataclass(frozen=True, eq=False)
class OfSome(Instance):
    """An instance of which some rollouts are enumerated; others are all but impossible, or like one of these.

    Attributes:
        some: The rollouts that are enumerated; each has the weight of those that it stands for.
        alike: Contexts (C,) in which all tokens are equally likely under policy, reference and sampler, None if there
            are none. One token stands for all of them, to a loss that does not read which it is; the gradient there is
            that of one log-prob, and over all tokens it is zero.
    """

    some: Paths = field(kw_only=True)
    alike: np.ndarray | None = field(default=None, kw_only=True)

    @cached_property
    def paths(self) -> Paths:
        """The rollouts that are enumerated."""
        return self.some

    def of_all(self, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient with zeros where one token stands for all."""
        return gradient if self.alike is None else np.where(self.alike[:, None], 0.0, gradient)


def _near(environment: Environment, policy: np.ndarray, direction: np.ndarray, bound: float) -> np.ndarray:
    """Move the policy in a direction until the largest |Σ log-ratio| of a rollout is 0.5 to 0.9 of the bound."""
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
    """Return the largest sum of a cost (C, V) along any rollout."""
    goes_on = (environment.successors != END) & (environment.probabilities > 0)
    following = np.where(goes_on, environment.successors, 0)
    best = environment.backwards(
        lambda later: (cost + np.where(goes_on, later[following], 0.0).max(axis=2)).max(axis=1),
        np.zeros(environment.n_contexts),
    )
    return float(best[environment.start].max())
