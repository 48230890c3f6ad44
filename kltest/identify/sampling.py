"""Rows from samples, for what is not enumerated: the relative bias is confirmed, refuted or inconclusive.

In each instance d = ‖E[ĝ] − t‖/‖t‖ lies in an interval that holds at all looks at once (kltest.samples.sampled).
Sampling stops as soon as the interval lies on one side of the margin m. The declared gradient t is confirmed if d ≤ m
in every instance, refuted if d > m in one, and else the row is inconclusive; d = 0 is never claimed. All rows and
instances of a grading share the error rate: it bounds the probability that any of their intervals misses. A gradient is
named only if what the name leaves of it is surely within the margin, and no other name may be as near.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kltest.identify.case import Case, target, worst_cosine
from kltest.identify.combinations import Combination
from kltest.identify.evaluate import row_of
from kltest.identify.identification import Identification
from kltest.identify.rows import Row
from kltest.samples.blocks import Sample
from kltest.samples.fits import distance, nearest
from kltest.samples.sampled import LEAST, OWN, ROUNDING, UNIT, Sampled, sampled
from kltest.truth import gradient as true_gradient

if TYPE_CHECKING:
    from kltest.loss.calling import Loss
    from kltest.moments.moments import Reduction


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling; grading's options check them.

    Attributes:
        requested: True if everything is sampled, and not only what cannot be enumerated.
        error_rate: Highest probability that an interval misses, shared by all rows.
        margin: Largest relative bias that is confirmed.
        samples: Most batches drawn in an instance; None for the default of kltest.samples.sampled.
        bound: Largest norm of a batch's gradient, if one is known.
        rows: Rows that share the error rate.
    """

    requested: bool = False
    error_rate: float = 1e-6
    margin: float = 0.05
    samples: int | None = None
    bound: float | None = None
    rows: int = 1


def sample(
    loss: "Loss",
    declared: Combination,
    case: Case,
    sampling: Sampling,
    batch: int = 1,
    *,
    noisy: bool = False,
    apart: "Reduction | None" = None,
    average: "Loss | None" = None,
) -> list[Sampled]:
    """Sample the gradient of batches of `batch` rollouts on each instance; exceptions are those of `sampled`."""
    drawn = case.instances
    targets = [target(declared, instance, case.sampler) for instance in drawn]
    name = f"{case.environment}/{case.sampler}/{batch}"
    seeds = np.random.SeedSequence([case.seed, zlib.crc32(name.encode())]).generate_state(len(drawn))
    return [
        sampled(
            loss,
            instance,
            case.sampler,
            target=wanted,
            unit=wanted if wanted.any() else true_gradient("reverse_kl", instance),
            margin=sampling.margin,
            error_rate=sampling.error_rate / (sampling.rows * len(drawn)),
            samples=sampling.samples,
            size=batch,
            grouped=case.group is not None,
            noisy=noisy,
            apart=apart,
            average=average,
            bound=sampling.bound,
            padding=case.seed,
            seed=int(seed),
        )
        for instance, wanted, seed in zip(drawn, targets, seeds, strict=True)
    ]


def sampled_row(case: Case, declared: Combination, sampling: Sampling, found: Sequence[Sampled], why: str = "") -> Row:
    """Return the row of a case from samples, one set an instance; `why` tells why nothing was enumerated."""
    targets = [target(declared, instance, case.sampler) for instance in case.instances]
    low, high = max(one.distance.low for one in found), max(one.distance.high for one in found)
    identification = identify_sampled(found, {name: case.candidates[name] for name in case.basis}, sampling)
    agrees = True if high <= sampling.margin else False if low > sampling.margin else None
    samples = max(one.samples for one in found)
    note = _words(agrees, sampling, (low, high), samples, found[0].asymptotic)
    note += "".join(
        f"; the coefficient of {name} is between {ends[0]:.4g} and {ends[1]:.4g}"
        for name, ends in identification.ends.items()
    )
    return row_of(
        case,
        declared,
        found,
        identification,
        agrees=agrees,
        relative_bias=max(one.distance.value for one in found),
        cosine=worst_cosine([one.gradient for one in found], targets, identification),
        method="sampled",
        rollouts=samples * found[0].batch,
        note="; ".join(filter(None, (why, note))),
        error_rate=sampling.error_rate,
        margin=sampling.margin,
        samples=samples,
        interval=(low, high),
        asymptotic=found[0].asymptotic,
    )


def _words(
    agrees: bool | None, sampling: Sampling, interval: tuple[float, float], samples: int, asymptotic: bool
) -> str:
    surely = f"at error rate {sampling.error_rate:.3g} ({'asymptotic' if asymptotic else 'at any number of samples'})"
    margin = f"{100 * sampling.margin:.3g}%"
    if agrees is not None:
        return f"{'confirmed within' if agrees else 'off by more than'} {margin} {surely}"
    low, high = (f"{100 * end:.3g}%" for end in interval)
    between = f"between {low} and {high}" if np.isfinite(interval[1]) else "unknown"
    return f"inconclusive after {samples} samples: the relative bias is {between}, the margin {margin}, {surely}"


def identify_sampled(
    found: Sequence[Sampled], candidates: Mapping[str, Sequence[np.ndarray]], sampling: Sampling
) -> Identification:
    """Identify the combination of the fewest candidates that leaves surely less than the margin of every instance.

    Blocks of all instances are put side by side, so that coefficients are common to them. A coefficient is 1 if its
    interval contains 1. The combination is None if another may be as near, or if too much may be left; the residual is
    then that of the best one. Zero counts as a named gradient.

    Args:
        found: Samples, an instance each.
        candidates: (C, V) gradients by name, an instance each; none is a combination of others.
        sampling: The margin and the error rate.
    """
    blocks = min(len(one.sample) for one in found)
    if blocks < LEAST:
        return Identification(None, 1.0)
    own = np.concatenate([one.sample.vectors[:blocks, OWN] for one in found], axis=1)
    unit = np.concatenate([one.sample.vectors[0, UNIT] for one in found])
    named = [unit, *(np.concatenate([part.ravel() for part in parts]) for parts in candidates.values())]
    fixed = np.broadcast_to(np.stack(named), (blocks, len(named), unit.size))
    sample = Sample(np.concatenate([own[:, None], own[:, None], fixed], axis=1))
    _, gradient, length, *others = np.eye(sample.vectors.shape[1])
    rate = sampling.error_rate / (sampling.rows * max(one.looks for one in found))
    unseen = math.hypot(*(one.unseen for one in found))
    norm = distance(sample, gradient, length, length[None], (), rate, unseen)
    if norm.high <= sampling.margin:
        return Identification({"zero": 1.0}, 0.0)
    names = dict(zip(candidates, others, strict=True))
    fit = nearest(sample, gradient, names, rate, sampling.margin, within=0.0) if norm.low > 0 else None
    if fit is None:
        return Identification(None, 1.0)
    rest = gradient - sum(one.value * names[name] for name, one in fit.terms.items())
    left = distance(sample, rest, gradient, length[None], (), rate, unseen)
    if fit.rivals or not left.high <= sampling.margin:
        return Identification(None, fit.misfit.value)
    terms = {
        name: 1.0 if one.low - ROUNDING <= 1.0 <= one.high + ROUNDING else one.value for name, one in fit.terms.items()
    }
    ends = {name: (one.low, one.high) for name, one in fit.terms.items() if terms[name] != 1.0}
    return Identification(terms, fit.misfit.value, ends)
