"""Samples of a loss's gradient: rollouts are drawn, the loss is called on them, a batch gives one gradient."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kltest.environments import Environment, Instance, Paths
from kltest.errors import InvalidEnvironmentError, KltestError
from kltest.loss.calling import Loss
from kltest.moments.batches import adds_up, joint_paths, order_is_free
from kltest.moments.caller import Caller
from kltest.moments.differentiate import RowGradients, differentiate
from kltest.moments.moments import Reduction
from kltest.moments.projection import each_gradient
from kltest.moments.reduction import probe
from kltest.rollout import Centre, Rollout

# Batches on which is tried how a loss combines rows.
PROBED = 16
# Fewest and most batches of each of two sizes whose mean gradients are compared.
COMPARED, MOST_COMPARED = 128, 4096
# Standard errors between these means that count as a difference: chance exceeds six less than once in 10⁸ times.
SURE = 6.0


class CoupledError(KltestError):
    """Rows that had seemed independent are coupled."""


@dataclass
class Drawing:
    """Draws batches of `size` rollouts and calls the loss on them; `grouped` batches are rollouts of one prompt."""

    loss: Loss
    instance: Instance
    sampler: str
    size: int
    grouped: bool
    padding: int
    generator: np.random.Generator

    def __post_init__(self) -> None:
        prompts = self.instance.environment.prompts
        self._each = [self.instance.environment]
        if self.grouped and len(prompts) > 1:
            self._each = [replace(self.instance.environment, prompts=one) for one in np.eye(len(prompts))]

    def paths(self, count: int) -> Paths:
        """Rollouts of `count` batches, one batch after the other."""
        if len(self._each) == 1:
            return self._sample(self._each[0], count)
        groups = self.generator.multinomial(count, self.instance.environment.prompts)
        parts = [self._sample(each, n) for each, n in zip(self._each, groups.tolist(), strict=True) if n]
        columns = ("contexts", "tokens", "mask", "prompt", "log_weight")
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
        return Paths(**joined)

    def _sample(self, environment: Environment, count: int) -> Paths:
        return environment.sample(self.instance.behaviour(self.sampler), count * self.size, self.generator)

    def rollout(self, paths: Paths) -> Rollout:
        """Fields of rollouts; advantages are centred within a batch if it has several rows."""
        centre: Centre = "batch" if self.size > 1 else "environment"
        return Rollout.of(self.instance, paths, sampler=self.sampler, padding=self.padding, centre=centre)

    def call(self, paths: Paths, factor: float = 1.0, rollout: Rollout | None = None) -> RowGradients:
        """Call the loss on rollouts and differentiate `factor` times its objective."""
        live = paths.mask if paths.padded else None
        return differentiate(self.loss, rollout or self.rollout(paths), live, factor)

    def project(self, paths: Paths, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """(n, C·V) gradients with respect to logits, from gradients by leaf."""
        policy = self.instance.policy
        if not leaves:
            return np.zeros((len(paths), policy.size))
        return each_gradient(paths, policy, leaves.get("logp"), leaves.get("logits")).reshape(len(paths), -1)


def draws_of(drawn: Drawing, noisy: bool) -> "Draws":
    """The source that needs the fewest calls; `noisy` says that the loss draws random numbers of its own."""
    if drawn.size > 1:
        return Batches(drawn, noisy=noisy)
    if noisy:
        return Singles(drawn, "mean")
    caller = probe(drawn.loss, drawn.rollout(drawn.paths(PROBED)), drawn.generator)
    if len(caller.shares) != 1:
        # If every gradient was zero, a mean cannot be told from a sum.
        return Singles(drawn, caller.reduction, caller.coupling)
    return Rows(drawn, caller.reduction)


class Draws:
    """Samples: `take` returns the rollouts of n batches and the gradient (n, C·V) of each."""

    together = False

    def __init__(self, drawn: Drawing, reduction: Reduction, coupling: str = "") -> None:
        self.drawn, self.reduction, self.coupling = drawn, reduction, coupling
        self.dtype = "float64"
        self.leaves: frozenset[str] = frozenset()

    def take(self, count: int) -> tuple[Paths, np.ndarray]:
        """Draw `count` batches."""
        raise NotImplementedError


class Singles(Draws):
    """Rollouts called one by one."""

    def take(self, count: int) -> tuple[Paths, np.ndarray]:
        paths = self.drawn.paths(count)
        rollout = self.drawn.rollout(paths)
        gradients = np.empty((count, self.drawn.instance.policy.size))
        for row in range(count):
            part = paths.take(np.array([row]))
            called = self.drawn.call(part, rollout=rollout.take([row]))
            gradients[row] = self.drawn.project(part, called.by_leaf)
            self.dtype, self.leaves = called.dtype, self.leaves | called.leaves
        return paths, gradients


class Rows(Draws):
    """Independent rows, called together; each is a sample, and one of each call is compared with a call of it alone."""

    together = True

    def take(self, count: int) -> tuple[Paths, np.ndarray]:
        paths = self.drawn.paths(count)
        rollout = self.drawn.rollout(paths)
        called = self.drawn.call(paths, 1.0 if self.reduction == "sum" else float(count), rollout)
        self.dtype, self.leaves = called.dtype, self.leaves | called.leaves
        row = int(self.drawn.generator.integers(count))
        alone = self.drawn.call(paths.take(np.array([row])), 1.0, rollout.take([row]))
        if not called.close(alone.row(0), called.row(row)):
            raise CoupledError(f"in a batch of {count} rollouts the gradient of a row is not the one that it has alone")
        return paths, self.drawn.project(paths, called.by_leaf)


class Batches(Draws):
    """Batches called one by one, or many groups in one call if the loss keeps them apart.

    The gradient of a loss that sums over rows is divided by their number. `added_up` says if it does; None: it is
    measured, and InvalidEnvironmentError raised if samples do not decide it.
    """

    def __init__(self, drawn: Drawing, *, noisy: bool, added_up: bool | None = None) -> None:
        super().__init__(drawn, "mean" if noisy else "coupled")
        size, generator = drawn.size, drawn.generator
        paths = drawn.paths(PROBED)
        self._caller = Caller(drawn.loss, drawn.rollout(paths), batches=True)
        pool = np.flatnonzero(paths.prompt == paths.prompt[0]) if drawn.grouped else np.arange(len(paths))
        self.factor = 1.0
        if not noisy:
            free = order_is_free(self._caller, pool, size, generator)
            if drawn.grouped and free:
                self._caller.try_together(pool, size, generator)
        if added_up is None:
            seems = self._noise_adds_up(pool) if noisy else adds_up(self._caller, pool, size, generator)
            added_up = seems and self._grows(noisy)
        if added_up and noisy:
            self.reduction = "sum"
        self.factor = 1.0 / size if added_up else 1.0

    def take(self, count: int) -> tuple[Paths, np.ndarray]:
        paths = self.drawn.paths(count)
        self._caller.take_from(self.drawn.rollout(paths))
        rows = np.arange(len(paths)).reshape(count, self.drawn.size)
        joined = joint_paths(paths, rows, np.zeros(count))
        gradients = np.empty((count, self.drawn.instance.policy.size))
        for part in self._caller.gradients(rows, self.drawn.generator):
            gradients[part.index] = self.drawn.project(joined.take(part.index), part.by_leaf)
            self.dtype, self.leaves = self._caller.dtype, self.leaves | part.by_leaf.keys()
        return paths, gradients * self.factor

    def _grows(self, noisy: bool) -> bool:
        """True if the mean gradient doubles with the batch size, False if it stays the same.

        Doubling every row of a batch proves nothing: (Σ_i u_i)²/2n has cross terms, which vanish on average.
        """
        size, name = self.drawn.size, self.drawn.loss.name
        try:
            double = Batches(replace(self.drawn, size=2 * size), noisy=noisy, added_up=False)
            direction = sum(source.take(COMPARED)[1].mean(axis=0) for source in (self, double))
            length = float(np.linalg.norm(direction))
            if length == 0:
                return False
            along: list[np.ndarray] = [np.empty(0), np.empty(0)]
            while len(along[0]) < MOST_COMPARED:
                fresh = max(COMPARED, len(along[0]))
                for place, source in enumerate((self, double)):
                    along[place] = np.append(along[place], source.take(fresh)[1] @ direction / length)
                one, two = along
                # A sum doubles, a mean stays the same: the bound between them is √2.
                away, together = two.mean() - np.sqrt(2) * one.mean(), two.mean() + one.mean()
                unsure = SURE * np.sqrt((two.var() + 2 * one.var()) / len(one))
                if together > unsure and abs(away) > unsure:
                    return bool(away > 0)
        except KltestError:  # the loss takes batches of one size only
            return True
        raise InvalidEnvironmentError(
            f"{MOST_COMPARED} batches of {size} rollouts of environment {self.drawn.instance.environment.name!r}, and "
            f"as many of {2 * size}, do not tell whether {name} adds the gradients of its rows up or averages them: "
            "they are too noisy, or about zero. Return a mean over rollouts, or use a smaller environment"
        )

    def _noise_adds_up(self, pool: np.ndarray) -> bool:
        """True if a loss that draws random numbers adds rows up: noise does not hide a factor of the batch's size.

        The absolute entries of a batch's gradient sum to the average of one row alone for a mean, and to n times that
        for a sum over n rows.
        """
        size, generator = self.drawn.size, self.drawn.generator

        def total(rows: int) -> float:
            called = [self._caller.call(generator.choice(pool, size=rows)) for _ in range(4 * PROBED // rows + PROBED)]
            return float(np.mean([sum(np.abs(part).sum() for part in one.parts) for one in called]))

        try:
            return total(size) > total(1) * np.sqrt(size)
        except KltestError:  # the loss does not take one row
            return False
