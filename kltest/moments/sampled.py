"""The expected gradient of any loss from samples, with a sphere around the estimate that holds whenever one stops.

This is for what cannot be enumerated: environments with too many rollouts, losses that couple the rows of large batches
or groups, losses that draw random numbers. A sample is the gradient of one batch with respect to the policy's logits,
minus the noise that it shares with estimators of known expectation on the same rollouts (kltest.moments.pairing).
"""

from dataclasses import dataclass

import numpy as np

from kltest.environments import Instance
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.moments.confidence import Asymptotic, EmpiricalBernstein, tuned
from kltest.moments.drawing import CoupledError, Drawing, Singles, Source, source_of
from kltest.moments.moments import ExpectedGradient
from kltest.moments.pairing import KNOWN, Pairing

# Most samples by default: if rows can be called together, and if each batch needs a call of its own.
ROWS, BATCHES = 200_000, 10_000
# Pilot samples, which only set coefficients and the mixture; as many again are drawn before anything is claimed.
PILOT_ROWS, PILOT_BATCHES = 512, 128
# Most rollouts of one chunk; the coefficients are fixed within a chunk.
MOST_ROWS = 2**14
# Most numbers in one chunk of samples of all known estimators.
CHUNK = 2**22
# A sample's gradient is a vector, and its covariance a matrix, over all contexts and tokens.
MOST_LOGITS = 2048
# Most entries of a table of all known estimators on all rollouts, from which their largest norms are taken.
MOST_KNOWN = 2**24
# A norm may exceed its bound by this share, from rounding.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Sampled(ExpectedGradient):
    """Estimate of the expected gradient of a batch from samples, compared with a target.

    Attributes:
        radius: ‖E[ĝ] − gradient‖ is at most this, at the error rate, whenever sampling was stopped.
        distance: ‖gradient − target‖.
        samples: Number of batches drawn.
        second_moment: Estimate of E‖ĝ‖².
        variance: Estimate of the trace of the covariance of a batch's gradient.
        left: Share of the variance that pairing leaves.
        asymptotic: True if the error rate holds in the limit of many samples only.
    """

    radius: float
    distance: float
    samples: int
    second_moment: float
    variance: float
    left: float
    asymptotic: bool

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of ‖E[ĝ] − target‖."""
        return max(0.0, self.distance - self.radius), self.distance + self.radius


def sampled(
    loss: Loss,
    instance: Instance,
    sampler: str = "current",
    *,
    target: np.ndarray,
    accuracy: float,
    error_rate: float = 1e-6,
    samples: int | None = None,
    size: int = 1,
    grouped: bool = False,
    noisy: bool = False,
    bound: float | None = None,
    pair: bool = True,
    padding: int = 0,
    seed: int = 0,
) -> Sampled:
    """Estimate E[ĝ] of a batch until ‖E[ĝ] − target‖ is known to be at most `accuracy`, or above it.

    The same `seed` gives the same samples, of the loss's own randomness too if it comes from torch, numpy's global
    generator or `random`.

    Args:
        loss: The loss, bound to a rollout's fields.
        instance: Environment with policy, reference and sampler, C contexts and V tokens.
        sampler: "current" draws rollouts from the policy, "stale" from the sampler.
        target: (C, V) gradient with respect to logits to compare with.
        accuracy: Distance from `target` to decide about, in the same unit.
        error_rate: Highest probability that the sphere ever misses E[ĝ].
        samples: Most batches to draw; None: ROWS or BATCHES.
        size: Rollouts in a batch. Batches of several are called whole, and a sum over rows is divided by their number.
        grouped: A batch is a group, rollouts of one prompt; else its rows are independent. `advantage` is the reward
            minus its mean over the batch's rows of the same prompt.
        noisy: The loss draws random numbers.
        bound: Largest norm of a batch's gradient, if one is known. The sphere is then an empirical Bernstein one, valid
            at any number of samples; without it, asymptotic (kltest.moments.confidence).
        pair: False to subtract no known estimators.
        padding: Seed of what stands at padded positions.
        seed: Seed of rollouts.

    Returns:
        The estimate with its sphere; neither side of `accuracy` is certain if `samples` were spent.

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

    def follow(source: Source) -> Sampled:
        pairing = Pairing(instance, sampler, size, known=KNOWN if pair else {})
        most = samples or (ROWS if source.together else BATCHES)
        run = _Run(source, pairing, target.ravel(), accuracy, error_rate, bound, most)
        run.follow()
        return run.result(target.shape)

    with preserved(seed):
        try:
            return follow(source_of(drawn, noisy))
        except CoupledError as error:
            return follow(Singles(drawn, "coupled", str(error)))


class _Run:
    """Pilot samples first, then a sequence of spheres from fresh ones, at most `samples` together."""

    def __init__(
        self,
        source: Source,
        pairing: Pairing,
        target: np.ndarray,
        accuracy: float,
        error_rate: float,
        bound: float | None,
        samples: int,
    ) -> None:
        self.source, self.target, self.accuracy, self.bound, self.samples = source, target, accuracy, bound, samples
        self.pairing, self.bounds = _bounded(pairing, bound)
        self.drawn = 0
        self.longest = float(np.linalg.norm(target))
        self._sum, self._squares, self._left = np.zeros(target.size), 0.0, 0.0
        self.first = PILOT_ROWS if source.together else PILOT_BATCHES
        gradients, known = self._draw(max(1, min(self.first, samples // 2)))
        self.pairing.learn(gradients, known)
        rest = self.pairing.less_noise(gradients, known)
        self.spheres: Asymptotic | EmpiricalBernstein
        if bound is not None:
            self.spheres = EmpiricalBernstein(bound, error_rate)
        else:
            centred = rest - rest.mean(axis=0)
            mixture, _ = tuned(centred.T @ centred / len(rest), accuracy, error_rate)
            self.spheres = Asymptotic(error_rate, mixture, start=self.first)

    def follow(self) -> None:
        """Draw until the sphere decides, or `samples` are spent."""
        while self.drawn < self.samples and not self._decided():
            size = min(max(self.first, self.drawn // 4), self.samples - self.drawn, self._most)
            gradients, known = self._draw(size)
            rest = self.pairing.less_noise(gradients, known)
            if isinstance(self.spheres, Asymptotic):
                self.spheres.update(rest, longest=max(self.longest, float(np.linalg.norm(rest, axis=1).max())))
            else:
                taken = float(np.abs(self.pairing.coefficients) @ self.bounds)
                self.spheres.update(rest, bound=self.spheres.bound + taken)
            self._left += float(((rest - self.spheres.sphere.centre) ** 2).sum())
            self.pairing.learn(gradients, known)

    def result(self, shape: tuple[int, ...]) -> Sampled:
        sphere, source = self.spheres.sphere, self.source
        mean = self._sum / self.drawn
        variance = max(self._squares / self.drawn - float(mean @ mean), 0.0)
        left = self._left / max(self.spheres.count, 1)
        centre = sphere.centre if self.spheres.count else mean
        return Sampled(
            gradient=centre.reshape(shape),
            radius=float(sphere.radius),
            distance=float(np.linalg.norm(centre - self.target)),
            samples=self.drawn,
            batch=source.drawn.size,
            reduction=source.reduction,
            dtype=source.dtype,
            leaves=source.leaves,
            second_moment=self._squares / self.drawn,
            variance=variance,
            left=left / variance if variance > 0 else 1.0,
            asymptotic=self.spheres.asymptotic,
            coupling=source.coupling,
        )

    @property
    def _most(self) -> int:
        numbers = self.target.size * (len(self.pairing) + 1)
        return max(1, min(MOST_ROWS // self.source.drawn.size, CHUNK // numbers))

    def _decided(self) -> bool:
        if self.spheres.count == 0:
            return False
        sphere = self.spheres.sphere
        distance = float(np.linalg.norm(sphere.centre - self.target))
        return bool(distance + sphere.radius <= self.accuracy or distance - sphere.radius > self.accuracy)

    def _draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        paths, gradients = self.source.take(count)
        self.drawn += count
        self._sum += gradients.sum(axis=0)
        self._squares += float((gradients**2).sum())
        longest = float(np.linalg.norm(gradients, axis=1).max())
        if self.bound is not None and longest > self.bound * (1 + ROUNDING):
            raise UsageError(
                f"{self.source.drawn.loss.name}: the gradient of a batch has norm {longest:.6g}, beyond the bound of "
                f"{self.bound:.6g} that was stated. Leave the bound out, and the verdict is asymptotic"
            )
        self.longest = max(self.longest, longest)
        return gradients, self.pairing.samples(paths)


def _bounded(pairing: Pairing, bound: float | None) -> tuple[Pairing, np.ndarray]:
    """The pairing and, for a bound, the largest norms (K,) of its estimators; both empty if rollouts are too many."""
    if bound is None:
        return pairing, np.zeros(0)
    instance = pairing.instance
    numbers = instance.environment.count() * len(pairing) * instance.policy.size
    if not len(pairing) or pairing.products or numbers > MOST_KNOWN:
        return Pairing(instance, pairing.sampler, pairing.size, known={}), np.zeros(0)
    alone = Pairing(instance, pairing.sampler)
    return pairing, np.linalg.norm(alone.samples(instance.paths), axis=2).max(axis=0)
