"""Samples of a loss's gradient: rollouts are drawn, the loss is called on them, a batch gives one gradient."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kltest.environments import Environment, Instance, Paths
from kltest.errors import InvalidEnvironmentError, KltestError
from kltest.loss.calling import Loss
from kltest.moments.batches import adds_up, joint_paths, order_is_free
from kltest.moments.caller import Called, Caller
from kltest.moments.moments import Reduction
from kltest.moments.projection import each_gradient
from kltest.moments.reduction import probe
from kltest.rollout import Centre, Rollout

# Most samples by default: if rows can be called together, and if each batch needs a call of its own.
ROWS, BATCHES = 200_000, 10_000
# Samples in a unit, likewise.
UNIT_ROWS, UNIT_BATCHES = 8, 2
# Batches on which is tried how a loss combines rows.
PROBED = 16
# Rollouts of one call at least, each of them many times, if noise alone is drawn; and the most of such calls.
ROWS_OF_NOISE, CALLS_OF_NOISE = 2048, 20_000
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
        return Paths.joined([self._sample(each, n) for each, n in zip(self._each, groups.tolist(), strict=True) if n])

    def _sample(self, environment: Environment, count: int) -> Paths:
        return environment.sample(self.instance.behaviour(self.sampler), count * self.size, self.generator)

    def rollout(self, paths: Paths) -> Rollout:
        """Fields of rollouts; advantages are centred within a batch if it has several rows."""
        centre: Centre = "batch" if self.size > 1 else "environment"
        return Rollout.of(self.instance, paths, sampler=self.sampler, padding=self.padding, centre=centre)

    def project(self, paths: Paths, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """(n, C·V) gradients with respect to logits, from gradients by leaf."""
        policy = self.instance.policy
        if not leaves:
            return np.zeros((len(paths), policy.size))
        return each_gradient(paths, policy, leaves.get("logp"), leaves.get("logits")).reshape(len(paths), -1)


class EveryRollout:
    """Samples of the gradient of a loss that draws random numbers: each sees all rollouts, and noise alone is drawn.

    It is for losses that treat the rows of a batch apart, but for what they draw. A call has `unit` copies of the
    rollouts, a sample each; blocks are made of whole calls, so that copies may share random numbers. Attributes are
    those of `Draws`.
    """

    together, coupling = False, ""

    def __init__(self, drawing: Drawing, reduction: Reduction) -> None:
        self.drawing, self.reduction = drawing, reduction
        self.leaves: frozenset[str] = frozenset()
        paths, instance = drawing.instance.paths, drawing.instance
        self.unit = -(-ROWS_OF_NOISE // len(paths))
        self.most = CALLS_OF_NOISE * self.unit
        tiled = paths.take(np.tile(np.arange(len(paths)), self.unit))
        self._weights = instance.rollout_weights(drawing.sampler) * (1.0 if reduction == "sum" else len(tiled))
        self.caller = Caller(drawing.loss, drawing.rollout(tiled), logs=False)
        # Which context each token of the rollouts has, and which entry of a table of contexts and tokens it is.
        contexts = paths.contexts.ravel()[:, None] == np.arange(len(instance.policy))
        self._contexts = (contexts & paths.mask.ravel()[:, None]).astype(float)
        tokens = paths.tokens.ravel()[:, None] == np.arange(instance.environment.vocabulary)
        self._entries = (self._contexts[:, :, None] * tokens[:, None]).reshape(len(tokens), -1)

    def take(self, count: int) -> tuple[Paths, np.ndarray]:
        """Return no rollouts, and the gradient (count, C·V) of each sample."""
        policy, paths = self.drawing.instance.policy, self.drawing.instance.paths
        tables = np.zeros((-(-count // self.unit), self.unit, *policy.shape))
        for table in tables:
            called = self.caller.call(np.arange(len(self.caller.base)))
            self.leaves |= called.by_leaf.keys()
            for leaf, part in called.by_leaf.items():
                each = part.reshape(self.unit, len(paths), paths.shape[1], -1) * self._weights[:, None, None]
                each = each.reshape(self.unit, -1, each.shape[-1])
                if leaf == "logp":
                    table += (each[..., 0] @ self._entries).reshape(table.shape)
                else:
                    table += np.einsum("nc,unv->ucv", self._contexts, each)
        gradients = tables - np.exp(policy) * tables.sum(axis=-1, keepdims=True)
        return paths.take(np.arange(0)), gradients.reshape(-1, policy.size)[:count]


class Draws:
    """Samples of the gradient of a batch: rows of one call, batches of a call each, or groups that a call keeps apart.

    The gradient of a loss that sums over the rows of a batch is divided by their number.

    Attributes:
        reduction: How the loss combines rows.
        coupling: The observation that showed a coupling of rows, else empty.
        together: Rows are samples of their own and are called together.
        unit: Samples of which blocks are made; the first look is at as many units as there are blocks.
        most: Most samples, by default.
        leaves: Fields that the gradient reached so far.

    Args:
        drawing: The rollouts.
        noisy: The loss draws random numbers of its own.
        average: The loss without them, on average; it tells which groups may be called together.
        coupling: Why rows have to be called one by one, if that is known.
        added_up: The loss is known to sum over the rows of a batch, or not to; None: it is measured, and
            InvalidEnvironmentError raised if samples do not decide it.
    """

    def __init__(
        self,
        drawing: Drawing,
        *,
        noisy: bool,
        average: Loss | None = None,
        coupling: str = "",
        added_up: bool | None = None,
    ) -> None:
        self.drawing, self.coupling, self.together = drawing, coupling, False
        self.reduction: Reduction = "mean" if noisy else "coupled"
        self.leaves: frozenset[str] = frozenset()
        self.factor = 1.0
        self.noisy, self.average = noisy, average
        paths = drawing.paths(PROBED)
        base = drawing.rollout(paths)
        self.caller = Caller(drawing.loss, base, batches=drawing.size > 1, logs=False)
        if drawing.size > 1:
            self._how_batches_combine(paths, added_up)
        elif not (noisy or coupling):
            self.caller = probe(drawing.loss, base, drawing.generator)
            self.caller.logs = False
            self.reduction, self.coupling = self.caller.reduction, self.caller.coupling
            # If every gradient was zero, a mean cannot be told from a sum.
            self.together = len(self.caller.shares) == 1
        self.unit, self.most = (UNIT_ROWS, ROWS) if self.together else (UNIT_BATCHES, BATCHES)

    def take(self, count: int) -> tuple[Paths, np.ndarray]:
        """Return the rollouts of `count` batches, one after the other, and the gradient (count, C·V) of each."""
        drawing, size = self.drawing, self.drawing.size
        paths = drawing.paths(count)
        self.caller.take_from(drawing.rollout(paths))
        units = np.arange(len(paths)).reshape(count, size)
        joined = joint_paths(paths, units, np.zeros(count)) if size > 1 else paths
        gradients = np.empty((count, drawing.instance.policy.size))
        for part in self._called(units):
            gradients[part.index] = drawing.project(joined.take(part.index), part.by_leaf)
            self.leaves |= part.by_leaf.keys()
        return paths, gradients * self.factor

    def _called(self, units: np.ndarray) -> Iterator[Called]:
        if self.drawing.size > 1:
            yield from self.caller.gradients(units, self.drawing.generator, prove=not self.noisy)
        elif not self.together:
            yield from self.caller.alone(units)
        elif found := self.caller.joint(units, self.drawing.generator):
            yield found
        else:
            self.caller.found_coupled(f"a batch of {len(units)} rollouts")
            raise CoupledError(self.caller.coupling)

    def _how_batches_combine(self, paths: Paths, added_up: bool | None) -> None:
        size, generator, noisy = self.drawing.size, self.drawing.generator, self.noisy
        pool = np.flatnonzero(paths.prompt == paths.prompt[0]) if self.drawing.grouped else np.arange(len(paths))
        if not noisy and order_is_free(self.caller, [pool], size, generator) and self.drawing.grouped:
            self.caller.try_together(pool, size, generator)
        if self.average and self.drawing.grouped:
            quiet = Caller(self.average, self.caller.base, batches=True, logs=False)
            quiet.call(pool[:size])
            # Of equal length, so that a few show whether rows are added up; the longest differ most.
            lengths = paths.mask[pool].sum(axis=1)
            quiet.try_together(pool[lengths == lengths.max()], size, generator)
            self.caller.together, self.caller.shares = quiet.together, quiet.shares
        if added_up is None:
            seems = self._noise_adds_up(pool) if noisy else adds_up(self.caller, pool, size, generator)
            added_up = seems and self._grows()
        if added_up and noisy:
            self.reduction = "sum"
        self.factor = 1.0 / size if added_up else 1.0

    def _grows(self) -> bool:
        """True if the mean gradient doubles with the batch size, False if it stays the same.

        Doubling every row of a batch proves nothing: (Σ_i u_i)²/2n has cross terms, which vanish on average.
        """
        size, name = self.drawing.size, self.drawing.loss.name
        try:
            double = Draws(replace(self.drawing, size=2 * size), noisy=self.noisy, average=self.average, added_up=False)
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
            f"{MOST_COMPARED} batches of {size} rollouts of environment {self.drawing.instance.environment.name!r}, "
            f"and as many of {2 * size}, do not tell whether {name} adds the gradients of its rows up or averages "
            "them: they are too noisy, or about zero. Return a mean over rollouts, or use a smaller environment"
        )

    def _noise_adds_up(self, pool: np.ndarray) -> bool:
        """True if a loss that draws random numbers adds rows up: noise does not hide a factor of the batch's size.

        The absolute entries of a batch's gradient sum to the average of one row alone for a mean, and to n times that
        for a sum over n rows.
        """
        size, generator = self.drawing.size, self.drawing.generator

        def total(rows: int) -> float:
            called = [self.caller.call(generator.choice(pool, size=rows)) for _ in range(4 * PROBED // rows + PROBED)]
            return float(np.mean([sum(np.abs(part).sum() for part in one.parts) for one in called]))

        try:
            return total(size) > total(1) * np.sqrt(size)
        except KltestError:  # the loss does not take one row
            return False
