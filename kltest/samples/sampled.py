"""The expected gradient of any loss from samples, and how far it is from a target, with an interval.

This is for what cannot be enumerated: environments with too many rollouts, losses that couple the rows of large batches
or groups, losses that draw random numbers. A sample is the gradient of one batch with respect to the policy's logits,
minus the noise that it shares with estimators of known expectation on the same rollouts (kltest.samples.controls). The
statistics are those of an audit (kltest.samples.fits), or, for gradients of known largest norm, a bounded sphere.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kltest.environments import Instance
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.moments.moments import ExpectedGradient, Reduction
from kltest.samples.blocks import MOST_BLOCKS, Blocks, Interval, Sample
from kltest.samples.bounded import EmpiricalBernstein
from kltest.samples.controls import KNOWN, Controls
from kltest.samples.drawing import CoupledError, Drawing, Draws, EveryRollout
from kltest.samples.fits import distance

# Fewest blocks of which anything is said.
LEAST = 8
# Most rollouts of one chunk.
MOST_ROWS = 2**14
# Most numbers in one chunk of samples of all known estimators.
CHUNK = 2**22
# A sample's gradient is a vector over all contexts and tokens.
MOST_LOGITS = 2048
# Most entries of a table of all known estimators on all rollouts, from which their largest norms are taken.
MOST_KNOWN = 2**24
# A norm may exceed its bound by this share, from rounding.
ROUNDING = 1e-9
# Directions in which the controls vary less than this share of their largest variance count as rounding.
RANK = 1e-10
# Rows of the vectors of a unit; the controls stand behind them.
RAW, OWN, TARGET, UNIT = range(4)


@dataclass(frozen=True, kw_only=True)
class Sampled(ExpectedGradient):
    """Estimate of the expected gradient of a batch from samples, compared with a target.

    Attributes:
        distance: ‖E[ĝ] − target‖ in units of ‖unit‖, with an interval that holds at all looks at the error rate.
        sample: The blocks; row OWN is the gradient less its noise.
        unseen: A norm that rare batches may add to E[ĝ] though none was drawn, at the error rate.
        looks: Number of looks that share the error rate.
        samples: Number of batches drawn.
        second_moment: Estimate of E‖ĝ‖².
        variance: Estimate of the trace of the covariance of a batch's gradient.
        asymptotic: True if the error rate holds in the limit of many samples only.
    """

    distance: Interval
    sample: Sample
    unseen: float
    looks: int
    samples: int
    second_moment: float
    variance: float
    asymptotic: bool


def sampled(
    loss: Loss,
    instance: Instance,
    sampler: str = "current",
    *,
    target: np.ndarray,
    unit: np.ndarray | None = None,
    margin: float = 0.05,
    error_rate: float = 1e-6,
    samples: int | None = None,
    size: int = 1,
    grouped: bool = False,
    noisy: bool = False,
    apart: Reduction | None = None,
    average: Loss | None = None,
    bound: float | None = None,
    controls: bool = True,
    padding: int = 0,
    seed: int = 0,
) -> Sampled:
    """Estimate E[ĝ] of a batch until ‖E[ĝ] − target‖/‖unit‖ is known to be at most `margin`, or above it.

    If it is above, more is drawn until what was not seen is too little to hide which gradient it is. Looks are taken
    after 64 units and whenever their number has doubled; they share the error rate equally. The same `seed` gives the
    same samples, of the loss's own randomness too if it comes from torch, numpy's global generator or `random`.

    Args:
        loss: The loss, bound to a rollout's fields.
        instance: Environment with policy, reference and sampler, C contexts and V tokens.
        sampler: "current" draws rollouts from the policy, "stale" from the sampler.
        target: (C, V) gradient with respect to logits to compare with.
        unit: (C, V) gradient whose norm is the unit; None: the target.
        margin: Distance from `target` to decide about, in that unit.
        error_rate: Highest probability that the interval ever misses the distance.
        samples: Most batches to draw; None: as many as the way of drawing has by default.
        size: Rollouts in a batch. Batches of several are called whole, and a sum over rows is divided by their number.
        grouped: A batch is a group, rollouts of one prompt; else its rows are independent. `advantage` is the reward
            minus its mean over the batch's rows of the same prompt.
        noisy: The loss draws random numbers.
        apart: How it combines rows if it treats them apart but for these numbers: then all rollouts are enumerated in
            each sample. None: rollouts are drawn.
        average: The loss as it is on average over these numbers: it tells which groups may be called together. None:
            each is called alone.
        bound: Largest norm of a batch's gradient, if one is known. The interval then comes from an empirical Bernstein
            sphere, valid at any number of samples; without it, it is asymptotic (kltest.samples.fits).
        controls: False to subtract no known estimators.
        padding: Seed of what stands at padded positions.
        seed: Seed of rollouts.

    Returns:
        The estimate with its interval; neither side of `margin` is certain if `samples` were spent.

    Raises:
        BatchOfOneError: The loss cannot be called with one rollout.
        NonDeterministicError: The loss draws random numbers and is not `noisy`.
        TargetError: The loss fails, or its gradient is not finite.
        UsageError: A gradient has a norm above `bound`.
        InvalidEnvironmentError: The environment has more than MOST_LOGITS logits.
    """
    if target.size > MOST_LOGITS:
        raise InvalidEnvironmentError(
            f"environment {instance.environment.name!r} has {target.size} logits, and gradients are sampled for at "
            f"most {MOST_LOGITS}. Use a smaller vocabulary, or an n-gram environment, whose contexts do not grow with "
            "length"
        )
    drawn = Drawing(loss, instance, sampler, size, grouped, padding, np.random.default_rng([seed, size, padding]))
    fixed = np.stack([target.ravel(), (target if unit is None else unit).ravel()])

    def follow(source: Draws | EveryRollout) -> Sampled:
        known = Controls(instance, sampler, size, known=KNOWN if controls and apart is None else {})
        run = _Run(source, known, fixed, error_rate, bound, samples or source.most)
        for found in run.distances():
            if found.high <= margin or (found.low > margin and run.may_be_named(margin)):
                break
        return run.result(found, target.shape)

    with preserved(seed):
        if apart is not None:
            return follow(EveryRollout(drawn, apart))
        try:
            return follow(Draws(drawn, noisy=noisy, average=average))
        except CoupledError as error:
            return follow(Draws(drawn, noisy=noisy, average=average, coupling=str(error)))


class _Run:
    """Takes units into blocks, and bounds the distance of their mean from the target at each look."""

    def __init__(
        self,
        source: Draws | EveryRollout,
        controls: Controls,
        fixed: np.ndarray,
        error_rate: float,
        bound: float | None,
        most: int,
    ) -> None:
        self.source, self.controls, self.fixed, self.most = source, controls, fixed, most
        self.unit = source.unit
        self.looks = max(0, math.ceil(math.log2(most / (MOST_BLOCKS * self.unit)))) + 1
        self.rate = error_rate / self.looks
        self.blocks = Blocks()
        self.drawn, self.longest, self.bound = 0, float(np.linalg.norm(fixed[0])), bound
        self._sum, self._squares = np.zeros(fixed.shape[1]), 0.0
        self.sphere: EmpiricalBernstein | None = None
        if bound is not None:
            self.controls, self._bounds = _bounded(controls)
            self.sphere = EmpiricalBernstein(bound, error_rate)

    def distances(self) -> Iterator[Interval]:
        """Yield the distance at each look, until all samples are drawn."""
        for look in range(self.looks):
            goal = min(self.most, MOST_BLOCKS * self.unit * 2**look)
            while self.drawn < goal:
                self._draw(min(goal - self.drawn, self._chunk))
            yield self._distance()

    def result(self, found: Interval, shape: tuple[int, ...]) -> Sampled:
        sample, source = self._sample, self.source
        mean = self._sum / self.drawn
        return Sampled(
            gradient=(sample.mean[OWN] if len(sample) >= LEAST else mean).reshape(shape),
            distance=found,
            sample=sample,
            unseen=self._unseen,
            looks=self.looks,
            samples=self.drawn,
            batch=source.drawing.size,
            reduction=source.reduction,
            dtype=source.caller.dtype,
            leaves=source.leaves,
            second_moment=self._squares / self.drawn,
            variance=max(self._squares / self.drawn - float(mean @ mean), 0.0),
            asymptotic=self.sphere is None,
            coupling=source.coupling,
        )

    def may_be_named(self, margin: float) -> bool:
        """True if what was not seen is at most half of the margin's share of the gradient, or of the unit."""
        lengths = [float(np.linalg.norm(one)) for one in (self._sum / self.drawn, self.fixed[1])]
        return self._unseen <= margin / 2 * max(lengths)

    @property
    def _chunk(self) -> int:
        numbers = self.fixed.shape[1] * (len(self.controls) + 1)
        units = min(MOST_ROWS // self.source.drawing.size, CHUNK // numbers) // self.unit
        return max(1, units) * self.unit

    @property
    def _unseen(self) -> float:
        """An event that n samples miss with probability α has a chance of log(1/α)/n."""
        return math.log(1 / self.rate) * self.longest / self.drawn

    @property
    def _sample(self) -> Sample:
        sample = Sample(self.blocks.vectors, RANK)
        return sample.controlled(self._places) if len(sample) >= LEAST else sample

    @property
    def _places(self) -> range:
        return range(UNIT + 1, UNIT + 1 + len(self.controls))

    def _distance(self) -> Interval:
        target, unit = self.fixed
        if self.sphere is not None:
            centre, radius = self.sphere.sphere
            away, length = float(np.linalg.norm(centre - target)), float(np.linalg.norm(unit))
            return Interval(away / length, max(away - float(radius), 0.0) / length, (away + float(radius)) / length)
        sample = self._sample
        if len(sample) < LEAST:
            away = float(np.linalg.norm(self._sum / self.drawn - target) / np.linalg.norm(unit))
            return Interval(away, 0.0, math.inf)
        rows = np.eye(sample.vectors.shape[1])
        named = rows[[TARGET, UNIT]]
        return distance(sample, rows[OWN] - rows[TARGET], rows[UNIT], named, self._places, self.rate, self._unseen)

    def _draw(self, count: int) -> None:
        paths, gradients = self.source.take(count)
        longest = float(np.linalg.norm(gradients, axis=1).max())
        if self.bound is not None and longest > self.bound * (1 + ROUNDING):
            raise UsageError(
                f"{self.source.drawing.loss.name}: the gradient of a batch has norm {longest:.6g}, beyond the bound of "
                f"{self.bound:.6g} that was stated. Leave the bound out, and the verdict is asymptotic"
            )
        self.drawn, self.longest = self.drawn + count, max(self.longest, longest)
        self._sum += gradients.sum(axis=0)
        self._squares += float((gradients**2).sum())
        known = self.controls.samples(paths) if len(self.controls) else np.zeros((count, 0, gradients.shape[1]))
        if self.sphere is not None and len(self._sample) >= LEAST:
            # The coefficients come from earlier samples alone, as a martingale needs it.
            shares = self._sample.shares(self._places)
            largest = self.sphere.bound + float(np.abs(shares) @ self._bounds)
            self.sphere.update(gradients - np.einsum("k,nkd->nd", shares, known), bound=largest)
        whole = count // self.unit * self.unit
        parts = np.concatenate([gradients[:whole, None], known[:whole]], axis=1)
        for raw, *others in parts.reshape(-1, self.unit, *parts.shape[1:]).mean(axis=1):
            self.blocks.add(np.stack([raw, raw, *self.fixed, *others]))


def _bounded(controls: Controls) -> tuple[Controls, np.ndarray]:
    """The controls and the largest norms (K,) of their samples; both empty if rollouts are too many."""
    instance = controls.instance
    numbers = instance.environment.count() * len(controls) * instance.policy.size
    if not len(controls) or controls.products or numbers > MOST_KNOWN:
        return Controls(instance, controls.sampler, controls.size, known={}), np.zeros(0)
    alone = Controls(instance, controls.sampler)
    return controls, np.linalg.norm(alone.samples(instance.paths), axis=2).max(axis=0)
