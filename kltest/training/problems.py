"""Problems (an environment with a start and a reference), single runs, and what many runs share: tables and calls."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np

from kltest.environments import Environment, Instance
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.estimators import registry
from kltest.estimators.spec import Credit, Placement
from kltest.loss.calling import Loss, bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.training.batch import transposed

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
    ) -> Self:
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

    @cached_property
    def log_reference(self) -> np.ndarray:
        """Log-probs (C, V) of the reference."""
        return table(self.reference, what="reference")


@dataclass(frozen=True, eq=False)
class Run:
    """One run: ascent on E[R] − β·(the estimator's KL term).

    `estimator` is a registered name, any other target of `kltest grade`, a callable with the same calling convention,
    or None. `placement` and `credit` default to those of a registered estimator's SPEC, else to loss and return.
    `options` fill its other parameters by name: runs whose options differ need separate calls. With `whole` the
    estimator is the entire loss, the reward included.

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
    first, *others = {id(problem.environment): problem.environment for problem in problems}.values()
    for other in others:
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
        self.start = transposed(np.stack([problem.start for problem in problems]).astype(float))
        self.log_reference = transposed(np.stack([problem.log_reference for problem in problems]))
        self.reward = transposed(np.stack([problem.environment.reward for problem in problems]))
        self.beta = np.array([run.beta for run in runs], dtype=float)
        self.rate = np.array([run.learning_rate for run in runs], dtype=float)

    def __len__(self) -> int:
        return len(self.each)


def bound(run: Run) -> Loss:
    """Bind the run's estimator. Raises UsageError if it cannot be called."""
    call = Call(run.placement, run.credit, None, run.options)
    if isinstance(run.estimator, str):
        loss = resolve(run.estimator, call)
    else:
        assert run.estimator is not None
        name = getattr(run.estimator, "__qualname__", type(run.estimator).__name__)
        spec = next((entry.spec for entry in registry().values() if entry.function is run.estimator), None)
        loss = bind(run.estimator, call, name, spec=spec)
    return loss


def is_built_in(loss: Loss) -> bool:
    """True for an estimator of this package, whose SPEC is tested, placed where it says or as another cost."""
    own = getattr(loss.function, "__module__", "").startswith("kltest.estimators.")
    return loss.spec is not None and own and not loss.shaped


def sharing(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of the runs, grouped into those whose estimator can be called for all of them at once."""
    takes_beta: dict[Hashable, bool] = {}
    together: dict[Hashable, list[int]] = {}
    for row, run in enumerate(runs):
        options = tuple((name, *_same(value)) for name, value in sorted(run.options.items()))
        same = _same(run.estimator), run.placement, run.credit, run.whole, options
        if same not in takes_beta:
            # A function that takes β may not accept a tensor of them.
            takes_beta[same] = run.estimator is not None and bool(bound(run).takes & {"beta", "rollout"})
        together.setdefault((same, run.beta if takes_beta[same] else None), []).append(row)
    return list(together.values())


def _same(value: Any) -> tuple[Hashable, ...]:
    """A key that is equal for equal values."""
    # The type belongs to the key: 1, 1.0 and True are equal, but a function may distinguish them.
    kind = type(value).__name__
    return (kind, value) if isinstance(value, int | float | str | bool | None) else (kind, id(value))
