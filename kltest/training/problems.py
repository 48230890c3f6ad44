"""What is trained: a world with a start and a reference, and one run of training in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from kltest.environments import Environment, Instance
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.estimators.spec import Credit, Placement

STRUCTURE = ("start", "prompts", "successors", "probabilities")


@dataclass(frozen=True, eq=False)
class Problem:
    """A world whose reward is to be earned, with logits (C, V) where training starts and of the reference.

    Raises InvalidEnvironmentError for logits of another shape, or that are not finite.
    """

    environment: Environment
    start: np.ndarray
    reference: np.ndarray

    def __post_init__(self) -> None:
        Instance.of(self.environment, self.start, self.reference)

    @classmethod
    def draw(
        cls,
        environment: Environment,
        seed: int,
        *,
        distance: float = 2.0,
        reward: Literal["kept", "normal", "binary"] = "kept",
    ) -> Problem:
        """A random start and reference, |Σ log π/ref| < `distance` along every rollout, and a reward.

        The reward is the world's own ("kept"), or drawn for every context and token: standard "normal", or "binary",
        1 or 0 with equal chances. With `distance=0` training starts at the reference.
        """
        drawn = Instance.draw(environment, seed, distance=distance or 1.0)
        generator = np.random.default_rng([seed, 1])
        shape = (environment.n_contexts, environment.vocabulary)
        if reward == "normal":
            environment = replace(environment, reward=generator.standard_normal(shape))
        elif reward == "binary":
            environment = replace(environment, reward=generator.integers(2, size=shape).astype(float))
        elif reward != "kept":
            raise UsageError(f"a reward is 'kept', 'normal' or 'binary', not {reward!r}")
        return cls(environment, drawn.policy if distance else drawn.reference, drawn.reference)

    @property
    def log_reference(self) -> np.ndarray:
        """(C, V) the reference's log-probs."""
        return table(self.reference, what="reference")


@dataclass(frozen=True)
class State:
    """Where the runs of one call stand: log-probs (R, C, V) of the policy, the reference and the sampler."""

    log_policy: Tensor
    log_reference: Tensor
    log_sampler: Tensor


@dataclass(frozen=True)
class PerRun:
    """An argument of an estimator that is a number of each run's own, handed over as a (rows, 1) tensor.

    `value` is that number, or a function of the State that gives (R,) of them at every update.
    """

    value: float | Callable[[State], Tensor]


@dataclass(frozen=True, eq=False)
class Run:
    """One run: ascent on E[R] − β·(the estimator's KL term).

    `estimator` is a registered name, anything else that `kltest grade` takes as a target, a callable with the same
    calling convention, or None. `placement` and `credit` default to what a registered estimator says of itself, else
    to loss and return. `options` fill its other parameters by name; runs whose plain options differ are separate calls,
    a `PerRun` lets them share one. `whole`: the estimator is the entire loss, the reward included.
    Raises UsageError for a β or a learning rate that is negative or not finite.
    """

    problem: Problem
    estimator: str | Callable[..., Any] | None = None
    beta: float = 0.1
    learning_rate: float = 1.0
    seed: int = 0
    placement: Placement | None = None
    credit: Credit | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    def __post_init__(self) -> None:
        for what, number in (("coefficient β", self.beta), ("learning rate", self.learning_rate)):
            if not (np.isfinite(number) and number >= 0):
                raise UsageError(f"the {what} of a run must be finite and not negative, not {number}")
        if self.seed < 0:
            raise UsageError(f"the seed of a run must not be negative, not {self.seed}")
        if self.whole and self.estimator is None:
            raise UsageError("a run whose whole loss is an estimator needs one: there is nothing to train on")


def check_alike(problems: list[Problem]) -> Environment:
    """The world that all problems share, apart from its reward; UsageError where they differ."""
    if not problems:
        raise UsageError("there is no run to train")
    first = problems[0].environment
    seen = {id(first)}
    for problem in problems:
        world = problem.environment
        if id(world) in seen:
            continue
        seen.add(id(world))
        same = world.horizon == first.horizon and all(
            getattr(world, name) is getattr(first, name) or np.array_equal(getattr(world, name), getattr(first, name))
            for name in STRUCTURE
        )
        if not same:
            raise InvalidEnvironmentError(
                f"environments {first.name!r} and {world.name!r} differ in more than their reward: runs of one call "
                "share contexts, tokens, dynamics and horizon. Train them in two calls"
            )
    return first
