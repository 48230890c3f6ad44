"""Distance of a gradient from the declared one, and the short combination of named gradients that is nearest."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np

from kltest.samples.blocks import Interval, Sample, fit, misfit, norm, reach


def distance(
    sample: Sample,
    d: np.ndarray,
    unit: np.ndarray,
    named: np.ndarray,
    controls: Sequence[int],
    rate: float,
    unseen: float = 0.0,
) -> Interval:
    """Bound ‖E d‖/‖E unit‖ from both sides.

    From above by the lesser of two bounds. The mean over pairs of blocks, ‖E d‖² without noise, has the lower tail of a
    weighted sum of χ² variables off their centre: with weights of squares p²/2 and largest weight λ it falls below
    y = ‖E d‖² by s·√(p² + 4λy) with probability at most exp(−s²/2) (Laurent & Massart 2000, Lemma 1; Birgé 2001,
    Lemma 8.1), which is solved for y. And along E d the mean is a normal variable of variance λ at most, so that its
    norm is below ‖E d‖ by s·√λ as seldom: the better one if noise has few directions. Student's s stands for that of
    a variance which is known, if it is more.

    From below by cross-fitting: a direction w from one half of the blocks, and Student's interval of ⟨d, w⟩ over the
    other half, which is an ordinary mean; ‖E d‖ ≥ ⟨E d, w⟩ for any w of norm 1. Both halves serve in turn, with two
    directions each: the mean of d, and the nearest combination of the `named` gradients (K, Q), which has less noise.

    Both ends are moved by `unseen`, a norm that rare units may add to E d though none was drawn: the lower one by twice
    as much, since it is tested on half of the units.
    """
    square, (quadratic, along_any) = float(norm(d)(sample.products)), sample.spread(d)
    units = sample.interval(norm(unit), rate / 4)
    s = max(math.sqrt(2 * math.log(8 / rate)), reach(rate / 4, len(sample)))
    root = quadratic**2 + 4 * along_any * (max(square, 0.0) + s**2 * along_any)
    whole = float(np.linalg.norm(d @ sample.mean))
    most = min(max(square + 2 * s**2 * along_any + s * math.sqrt(root), 0.0), (whole + s * math.sqrt(along_any)) ** 2)
    lows = [0.0]
    for own, other in ((0, 1), (1, 0)):
        learn, test = sample.half(own), sample.half(other)
        # Row 1 uses all blocks; made anew, nothing of the other half is in the direction.
        raw = d.copy()
        raw[0], raw[1] = d[1], 0.0
        raw[list(controls)] -= d[1] * learn.shares(controls)
        for direction in _directions(learn, raw, named):
            if (length := float(np.linalg.norm(direction))) > 0:
                along = np.array([raw @ (block.astype(np.float64) @ direction) for block in test.vectors]) / length
                margin = reach(rate / 8, len(test)) * along.std(ddof=1) / math.sqrt(len(test))
                lows.append(float(along.mean() - margin))
    least, largest = math.sqrt(max(units.low, 0.0)), math.sqrt(max(units.high, 1e-300))
    value = math.sqrt(max(square, 0.0) / max(units.value, 1e-300))
    return Interval(
        value, max(max(lows) - 2 * unseen, 0.0) / largest, (math.sqrt(most) + unseen) / least if least else math.inf
    )


def _directions(learn: Sample, d: np.ndarray, named: np.ndarray) -> list[np.ndarray]:
    found = [d @ learn.mean]
    scale = np.sqrt(np.maximum(np.einsum("kq,qp,kp->k", named, learn.products, named), 0.0))
    kept = named[scale > 0] / scale[scale > 0, None]
    if len(kept):
        gram, right = kept @ learn.products @ kept.T, kept @ learn.products @ d
        found.append(np.linalg.lstsq(gram, right, rcond=1e-3)[0] @ kept @ learn.mean)
    return found


@dataclass(frozen=True)
class Combination:
    """A short combination near E x, with an interval for each coefficient.

    `misfit` is ‖E x − fit‖/‖E x‖. Unless that is surely within the margin, `rivals` are the other combinations of as
    many names that are not surely farther.
    """

    terms: dict[str, Interval]
    misfit: Interval
    rivals: tuple[tuple[str, ...], ...] = ()


def nearest(
    sample: Sample,
    x: np.ndarray,
    names: dict[str, np.ndarray],
    rate: float,
    margin: float,
    within: float | None = None,
    declared: Collection[str] = (),
) -> Combination | None:
    """Return the combination of the fewest names that E x may be: one, or two if each alone is surely too far.

    Which of two combinations is nearer depends on ⟨E x, E y⟩ alone, not on the noisier ‖E x‖: they are compared with
    each other. The nearest is returned, and as `rivals` those that are not surely farther, unless it surely fits. One
    of these takes its place if it is what was declared, or has coefficients that may be 1 and the nearest has not.

    Args:
        sample: The sketches.
        x: (Q,) the gradient in question.
        names: Named gradients (Q,) in the order of preference, none of them zero.
        rate: Error rate of all that is said.
        margin: A misfit surely beyond this share of ‖E x‖ is too far.
        within: A misfit surely below this fits, whatever else may; None: the margin.
        declared: Names of the declared combination.
    """
    within = margin if within is None else within
    found = None
    for terms in (1, 2):
        fits = {one: np.stack([names[name] for name in one]) for one in combinations(names, terms)}
        found = _nearest(sample, x, fits, rate / 2, within, frozenset(declared)) or found
        if found is None or found.misfit.low <= margin:
            return found
    return found


def _nearest(
    sample: Sample,
    x: np.ndarray,
    fits: dict[tuple[str, ...], np.ndarray],
    rate: float,
    within: float,
    declared: frozenset[str],
) -> Combination | None:
    """The nearest of several combinations, or the one in its place, and those that are not surely farther.

    None if none is defined.
    """
    try:
        values = {one: sample.estimate(misfit(x, columns)) for one, columns in fits.items()}
    except np.linalg.LinAlgError:
        return None
    values = {one: value for one, value in values.items() if all(map(math.isfinite, value))}
    if not values:
        return None
    best = min(values, key=lambda one: values[one][0])
    each, parts = rate / (2 * len(values)), rate / (2 * (len(best) + 1))

    def farther(one: tuple[str, ...]) -> bool:
        own, other = misfit(x, fits[best]), misfit(x, fits[one])
        return sample.interval(lambda products: other(products) - own(products), each).low > 0

    def terms(one: tuple[str, ...]) -> dict[str, Interval]:
        return _coefficients(sample, x, one, fits[one], parts)

    def left(one: tuple[str, ...]) -> Interval:
        return _left(sample, x, fits[one], parts)

    def whole(one: tuple[str, ...]) -> bool:
        return all(part.low <= 1 <= part.high for part in terms(one).values())

    near = sorted((one for one in values if one == best or not farther(one)), key=lambda one: values[one][0])
    chosen = next(iter([*(one for one in near if frozenset(one) == declared), *filter(whole, near), best]))
    rivals = tuple(one for one in near if one != chosen) if left(best).high > within**2 else ()
    return Combination(terms(chosen), _root(left(chosen)), rivals)


def fitted(sample: Sample, x: np.ndarray, names: Mapping[str, np.ndarray], rate: float) -> Combination:
    """Return the combination of all these named gradients (Q,) that is nearest to E x (Q,), one at least.

    Each of its intervals misses with probability `rate`.
    """
    columns = np.stack(list(names.values()))
    return Combination(_coefficients(sample, x, tuple(names), columns, rate), _root(_left(sample, x, columns, rate)))


def _coefficients(
    sample: Sample, x: np.ndarray, names: tuple[str, ...], columns: np.ndarray, rate: float
) -> dict[str, Interval]:
    solved = fit(x, columns)

    def term(k: int) -> Interval:
        return sample.interval(lambda products: solved(products)[..., k], rate)

    return {name: term(k) for k, name in enumerate(names)}


def _left(sample: Sample, x: np.ndarray, columns: np.ndarray, rate: float) -> Interval:
    """The squared misfit of a combination."""
    rest = x - np.nan_to_num(fit(x, columns)(sample.products)) @ columns
    return sample.interval(misfit(x, columns), rate, sample.pairs(rest) / float(abs(norm(x)(sample.products))))


def _root(square: Interval) -> Interval:
    return Interval(*(math.sqrt(max(number, 0.0)) for number in astuple(square)))
