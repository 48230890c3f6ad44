"""Problems (an environment with a start and a reference), single runs, and the tables of many runs at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from kltest.environments import Environment, Instance
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.estimators.spec import Credit, Placement
from kltest.training.sums import transposed

STRUCTURE = ("start", "prompts", "successors", "probabilities")


@dataclass(frozen=True, eq=False)
class Problem:
    """An environment with the (C, V) logits of the initial policy (`start`) and of the reference.

    Raises InvalidEnvironmentError if logits have another shape or are not finite.
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
        """Draw start and reference, with |Σ log π/ref| < `distance` along every rollout, and perhaps a reward.

        `reward` keeps that of the environment ("kept") or draws one for every context and token: standard "normal", or
        "binary" (0 or 1 with equal probability). With `distance=0` training starts at the reference.
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
        """Log-probs (C, V) of the reference."""
        return table(self.reference, what="reference")


@dataclass(frozen=True)
class State:
    """Log-probs (R, C, V) of policy, reference and sampler, for the runs of one call."""

    log_policy: Tensor
    log_reference: Tensor
    log_sampler: Tensor


@dataclass(frozen=True)
class PerRun:
    """An estimator's argument whose value differs between runs; the estimator receives a (rows, 1) tensor.

    `value` is the number of this run, or a function of the State that returns (R,) numbers at every update.
    """

    value: float | Callable[[State], Tensor]


@dataclass(frozen=True, eq=False)
class Run:
    """One run: ascent on E[R] − β·(the estimator's KL term).

    `estimator` is a registered name, any other target of `kltest grade`, a callable with the same calling convention,
    or None. `placement` and `credit` default to those of a registered estimator's SPEC, else to loss and return.
    `options` fill its other parameters by name: runs whose plain options differ need separate calls, runs that differ
    in a `PerRun` share one. With `whole` the estimator is the entire loss, the reward included.

    Raises UsageError if β, the learning rate or the seed is negative, or one of the first two is not finite.
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


def check_alike(problems: Sequence[Problem]) -> Environment:
    """Return the environment that all problems share, apart from its reward."""
    if not problems:
        raise UsageError("there is no run to train")
    first = problems[0].environment
    seen = {id(first)}
    for problem in problems:
        other = problem.environment
        if id(other) in seen:
            continue
        seen.add(id(other))
        pairs = [(getattr(other, name), getattr(first, name)) for name in STRUCTURE]
        if other.horizon != first.horizon or not all(a is b or np.array_equal(a, b) for a, b in pairs):
            raise InvalidEnvironmentError(
                f"environments {first.name!r} and {other.name!r} differ in more than their reward: runs of one call "
                "share contexts, tokens, dynamics and horizon. Train them in two calls"
            )
    return first


class Runs:
    """R runs in one environment, as arrays.

    Tables are (V, C, R), tokens first: a sum over a few tokens is then a sum of long contiguous vectors. `start` holds
    logits; `log_reference` and `reward` are tables; `beta` and `rate` are (R,). All runs share the dynamics.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        problems = [run.problem for run in runs]
        self.environment = check_alike(problems)
        self.each = runs
        self.start = _stacked(problems, lambda problem: np.asarray(problem.start, dtype=float))
        self.log_reference = _stacked(problems, lambda problem: problem.log_reference)
        self.reward = _stacked(problems, lambda problem: problem.environment.reward)
        self.beta = np.array([run.beta for run in runs], dtype=float)
        self.rate = np.array([run.learning_rate for run in runs], dtype=float)

    def __len__(self) -> int:
        return len(self.each)


def _stacked(problems: Sequence[Problem], read: Callable[[Problem], np.ndarray]) -> np.ndarray:
    """Stack a (C, V) table of each problem to (V, C, R); runs that share a problem share one read."""
    tables = {key: read(problem) for key, problem in {id(problem): problem for problem in problems}.items()}
    return transposed(np.stack([tables[id(problem)] for problem in problems]))
