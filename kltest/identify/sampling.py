"""Rows from samples, for what is not enumerated: the relative bias is confirmed, refuted or inconclusive.

In each instance d = ‖E[ĝ] − t‖/‖t‖ lies in an interval that holds at all times at once (kltest.moments.confidence).
Sampling stops as soon as the interval lies on one side of the margin m. The declared gradient t is confirmed if d ≤ m
in every instance, refuted if d > m in one, and else the row is inconclusive; d = 0 is never claimed. All rows and
instances of a grading share the error rate: it bounds the probability that any of their intervals misses.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kltest.identify.case import Case, size, target, worst_cosine
from kltest.identify.evaluate import row_of
from kltest.identify.identification import Identification
from kltest.identify.rows import Combination, Row
from kltest.moments import Sampled, sampled

if TYPE_CHECKING:
    from kltest.loss.calling import Loss


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling; grading's options check them.

    Attributes:
        requested: True if everything is sampled, and not only what cannot be enumerated.
        error_rate: Highest probability that an interval misses, shared by all rows.
        margin: Largest relative bias that is confirmed.
        samples: Most batches drawn in an instance; None for the default of kltest.moments.sampled.
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
    grouped: bool = False,
    noisy: bool = False,
) -> list[Sampled]:
    """Sample the gradient of batches of `batch` rollouts on each instance; exceptions are those of `sampled`."""
    drawn = case.instances
    name = f"{case.environment}/{case.sampler}/{batch}"
    seeds = np.random.SeedSequence([case.seed, zlib.crc32(name.encode())]).generate_state(len(drawn))
    return [
        sampled(
            loss,
            instance,
            case.sampler,
            target=(wanted := target(declared, instance, case.sampler)),
            accuracy=sampling.margin * (float(np.linalg.norm(wanted)) or size(instance)),
            error_rate=sampling.error_rate / (sampling.rows * len(drawn)),
            samples=sampling.samples,
            size=batch,
            grouped=grouped,
            noisy=noisy,
            bound=sampling.bound,
            padding=case.seed,
            seed=int(seed),
        )
        for instance, seed in zip(drawn, seeds, strict=True)
    ]


def sampled_row(case: Case, declared: Combination, sampling: Sampling, found: Sequence[Sampled], why: str = "") -> Row:
    """Return the row of a case from samples, one set an instance; `why` tells why nothing was enumerated."""
    targets = [target(declared, instance, case.sampler) for instance in case.instances]
    units = [float(np.linalg.norm(wanted)) or size(i) for wanted, i in zip(targets, case.instances, strict=True)]
    ends = [tuple(end / unit for end in one.interval) for one, unit in zip(found, units, strict=True)]
    low, high = (max(end) for end in zip(*ends, strict=True))
    identification = identify_sampled(found, {name: case.candidates[name] for name in case.basis})
    agrees = True if high <= sampling.margin else False if low > sampling.margin else None
    samples = max(one.samples for one in found)
    note = _words(agrees, sampling, (low, high), samples, found[0].asymptotic)
    return row_of(
        case,
        declared,
        found,
        identification,
        agrees=agrees,
        relative_bias=max(one.distance / unit for one, unit in zip(found, units, strict=True)),
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
    if agrees:
        return f"confirmed within {margin} {surely}"
    if agrees is False:
        return f"off by more than {margin} {surely}"
    between = (
        f"between {100 * interval[0]:.3g}% and {100 * interval[1]:.3g}%" if np.isfinite(interval[1]) else "unknown"
    )
    return f"inconclusive after {samples} samples: the relative bias is {between}, the margin {margin}, {surely}"


def identify_sampled(found: Sequence[Sampled], candidates: Mapping[str, Sequence[np.ndarray]]) -> Identification:
    """Identify the one of the candidates, none a combination of others, that every instance's sphere contains.

    A gradient with coefficient 1 is preferred; if none is in all spheres, a fitted multiple of one counts. The
    combination is None if several are possible or none is. Zero counts as a named gradient. The residual is that of
    the best single multiple of a named gradient, from the estimates.
    """
    columns = {name: np.concatenate([g.ravel() for g in given]) for name, given in candidates.items()}
    names = list(columns)
    estimate = np.concatenate([one.gradient.ravel() for one in found])
    contained = {name for name in names if all(_contains(s, g) for s, g in zip(found, candidates[name], strict=True))}
    if all(_contains(one, np.zeros_like(one.gradient)) for one in found):
        contained.add("zero")
    ranges = {name: _multiples(found, candidates[name]) for name in names}
    possible = {name: ends for name, ends in ranges.items() if ends[0] <= ends[1]}
    if len(contained) == 1:
        combination: Combination | None = {contained.pop(): 1.0}
    elif not contained and len(possible) == 1:
        ((name, ends),) = possible.items()
        fit = float(columns[name] @ estimate / (columns[name] @ columns[name]))
        combination = {name: min(max(fit, ends[0]), ends[1])}
    else:
        combination = None
    if combination is None:
        residual = min((_residual(estimate, columns[name]) for name in names), default=1.0)
    elif "zero" in combination:
        residual = 0.0
    else:
        ((name, coefficient),) = combination.items()
        residual = float(np.linalg.norm(estimate - coefficient * columns[name]) / np.linalg.norm(estimate))
    return Identification(combination, residual)


def _contains(sphere: Sampled, gradient: np.ndarray) -> bool:
    return float(np.linalg.norm(sphere.gradient - gradient)) <= sphere.radius


def _multiples(found: Sequence[Sampled], named: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the smallest and largest c with c·named in every sphere; there is none if the largest is less."""
    low, high = -np.inf, np.inf
    for sphere, gradient in zip(found, named, strict=True):
        square, along = float((gradient**2).sum()), float((gradient * sphere.gradient).sum())
        away = float((sphere.gradient**2).sum()) - sphere.radius**2
        if square == 0:
            if away > 0:
                return 1.0, 0.0
            continue
        half = along**2 - square * away
        if not half >= 0:
            return 1.0, 0.0
        low, high = max(low, (along - np.sqrt(half)) / square), min(high, (along + np.sqrt(half)) / square)
    return low, high


def _residual(estimate: np.ndarray, column: np.ndarray) -> float:
    norm = float(np.linalg.norm(estimate))
    if norm == 0:
        return 0.0
    fit = column * (column @ estimate / (column @ column))
    return float(np.linalg.norm(estimate - fit)) / norm
