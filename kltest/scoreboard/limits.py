"""Limits: what the gradient of a loss that couples rows comes to as batches grow, and how fast.

Small batches are enumerated, large ones sampled. Named gradients are the limit if three things hold in each of several
instances: they leave surely less than MARGIN of the gradient of the largest batches; what they leave goes as a/B, with
a fitted to the enumerated sizes alone, as far as the interval of each sampled size tells; and their coefficients have
settled.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from kltest.environments import Instance, ragged, sequence
from kltest.errors import KltestError
from kltest.files import mapped
from kltest.identify.graded import whole
from kltest.identify.identification import independent
from kltest.identify.instances import with_ties
from kltest.identify.measure import Measure
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.moments import exact_batches
from kltest.moments.batches import order_is_free
from kltest.moments.caller import Caller
from kltest.moments.moments import Moments
from kltest.rollout import Rollout
from kltest.samples.blocks import Interval, Sample, Statistic, fit, misfit, norm
from kltest.samples.fits import fitted
from kltest.samples.sampled import OWN, Sampled, sampled
from kltest.scoreboard.laws import NEAR, ROUGH
from kltest.scoreboard.rows import MARGIN, REWARDED
from kltest.truth import counts_alone, gradient

# Sizes of batches: enumerated, where they are at most MOST, and sampled, so many of each.
EXACT, SAMPLED = (2, 3, 4), (8, 32, 128)
MOST, BATCHES = 400, 128
# Fewest enumerated sizes to which a rate is fitted.
LEAST = 2
# Significant digits of what is returned: samples have no more.
DIGITS = 4
# Seeds of the instances, in each of which all has to hold. Named gradients have wide angles there, as in few others.
SEEDS = {"sequence": (54, 16), "ragged": (67, 8)}
SEED = 5
# Instances that only tell which names are independent.
FURTHER = 8
# Tokens of a rollout at most, over two tokens to choose from, and over more.
LENGTH, SHORT = 3, 2
# Of one interval; it holds in the limit of many samples.
ERROR_RATE = 1e-4
# A rate is the first order of what is left, which may be so many times more than was fitted at small sizes.
SLACK = 1.5
# Most names in a limit: of one combination, up to a factor, but for a reward beside the KL.
TERMS = 2

Names = tuple[str, ...]
Known = Mapping[str, np.ndarray]


def limits(loss: Loss, measure: Measure, rows: str, dtype: str, named: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the limits of a loss's gradient in sequences of one length and of several.

    Args:
        loss: The loss, or its KL part.
        measure: Its measurements, which know which names it may have.
        rows: What the rows of a batch are called: a batch, or a group if groups do not touch each other.
        dtype: The precision in which it computes.
        named: Names that the gradient of small batches has.

    Returns:
        For each environment in which large batches are taken: `environment`; `of`, which is `rows`; `terms`, by name
        the coefficients at the largest size, an interval an instance, {} if there is no gradient, None if no names are
        near; `lengths`, the mean length of rollouts, an instance each; `exact` and `sampled`, by size the share of the
        gradient that the names leave, in the instance where that is most, sampled with the ends of its interval;
        `rate`, a if that share goes as a/size, 0 if it is zero at all sizes and None if more is left than fitted or if
        coefficients still move; `beside_reward`, the coefficient of the KL over that of the reward in the whole loss
        with its interval, if both are in the limit, else None.
    """
    found = []
    for environment in ("sequence", "ragged"):
        with suppress(KltestError):  # it takes no batches of a size that is needed
            found.append({"environment": environment, "of": rows, **_limit(loss, environment, measure, dtype, named)})
    return mapped(found, lambda value: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value)


def keeps_groups_apart(loss: Loss) -> bool:
    """Return True if a call of several groups gives each what it gets alone: rows are coupled within groups only."""
    instance = _drawn("sequence", 0, SEED)
    pool, generator = np.arange(len(instance.paths)), np.random.default_rng(SEED)
    for size in EXACT:
        with suppress(KltestError), preserved(SEED):
            caller = Caller(loss, Rollout.of(instance), batches=True, logs=False)
            if not order_is_free(caller, [pool], size, generator):
                return False
            caller.try_together(pool, size, generator)
            return caller.together == "any"
    return False


def _drawn(environment: str, tokens: int, seed: int) -> Instance:
    """Rollouts over two tokens, or over as many as a support needs, with rewards of 0 and 1."""
    if environment == "sequence":
        built = sequence(max(tokens, 2), SHORT if tokens > 2 else LENGTH)
    else:
        built = ragged(max(tokens, 3), SHORT)
    return with_ties(Instance.draw(built, seed), seed)


def _limit(loss: Loss, environment: str, measure: Measure, dtype: str, named: Iterable[str]) -> dict[str, Any]:
    case = measure.case(environment, "current")
    instances = [_drawn(environment, case.least, seed) for seed in SEEDS[environment]]
    known = _known([*case.candidates], environment, instances, named)
    exact = {size: points for size in EXACT if (points := _enumerated(loss, instances, size))}
    drawn = {
        size: [_Drawn(_sampled(loss, one, size), own) for one, own in zip(instances, known, strict=True)]
        for size in SAMPLED
    }
    last = drawn[SAMPLED[-1]]
    found: dict[str, Any] = {"terms": None, "rate": None, "beside_reward": None}
    found["lengths"] = [float(one.rollout_weights("current") @ one.paths.lengths) for one in instances]
    for names in _nearest(last):
        left = {size: max(map(partial(_exactly_left, names), points, known)) for size, points in exact.items()}
        intervals = {size: _worst(one.left(names) for one in points) for size, points in drawn.items()}
        if intervals[SAMPLED[-1]].high > MARGIN:
            continue
        terms = [one.terms(names) for one in last]
        if not (set(names) == set(REWARDED) or _proportional(terms)):
            continue
        before = [one.terms(names) for one in drawn[SAMPLED[-2]]]
        settled = not any(map(_moved, before, terms))
        found |= {
            "exact": {str(size): share for size, share in left.items()},
            "sampled": {str(size): [one.value, one.low, one.high] for size, one in intervals.items()},
            "terms": {name: [[one[name].low, one[name].high] for one in terms] for name in names},
            "rate": _rate(left, intervals, NEAR.get(dtype, ROUGH)) if settled else None,
        }
        if found["rate"] is not None:
            break
    if found["rate"] is not None and set(found["terms"]) == set(REWARDED) and loss.takes_beta:
        found["beside_reward"] = _beside_reward(loss, instances, known)
    return found


def _known(
    names: Sequence[str], environment: str, instances: Sequence[Instance], named: Iterable[str]
) -> list[dict[str, np.ndarray]]:
    """The gradients of these names that are independent in such environments, those that are named already first."""
    order = dict.fromkeys(
        [name for name in named if name in names] + [name for name in names if not counts_alone(name)]
    )
    tokens = instances[0].environment.vocabulary
    drawn = [*instances, *(_drawn(environment, tokens, seed) for seed in range(FURTHER))]
    each = [{name: gradient(name, one).ravel() for name in order} for one in drawn]
    kept = independent({name: np.concatenate([own[name] for own in each]) for name in order})
    return [{name: own[name] for name in kept} for own in each[: len(instances)]]


def _enumerated(loss: Loss, instances: Sequence[Instance], size: int) -> list[tuple[np.ndarray, float]]:
    """The gradient of batches of a size and the scale of a rollout's, an instance each; [] if there are too many."""
    with suppress(KltestError), preserved(SEED):
        found = [exact_batches(loss, one, size=size, most=MOST, logs=False) for one in instances]
        by = [size if one.added_up else 1 for one in found]
        return [(one.gradient.ravel() / n, _scale(one, size) / n) for one, n in zip(found, by, strict=True)]
    return []


def _sampled(loss: Loss, instance: Instance, size: int) -> Sampled:
    zero, unit = np.zeros(instance.policy.shape), gradient("reverse_kl", instance)
    # A margin of zero is never surely met: all batches are drawn.
    options: dict[str, Any] = {"margin": 0.0, "error_rate": ERROR_RATE, "samples": BATCHES, "seed": SEED}
    return sampled(loss, instance, target=zero, unit=unit, size=size, **options)


def _scale(found: Moments | Sampled, size: int) -> float:
    """The root mean square of a rollout's gradient, as the noise of a batch of many shows it."""
    square = float((found.gradient**2).sum())
    return math.sqrt(size * max(found.second_moment - square, 0.0) + square)


def _exactly_left(names: Names, point: tuple[np.ndarray, float], known: Known) -> float:
    """The share of a gradient that the best combination of names leaves; without names, that of a rollout's."""
    own, scale = point
    if not names:
        return float(np.linalg.norm(own)) / scale
    columns = np.stack([known[name] for name in names], axis=1)
    rest = own - columns @ np.linalg.lstsq(columns, own, rcond=None)[0]
    return float(np.linalg.norm(rest) / np.linalg.norm(own))


class _Drawn:
    """Samples of the gradient of batches of one size in an instance, beside the named gradients."""

    def __init__(self, found: Sampled, known: Known) -> None:
        own, self.scale, self.known = found.sample.vectors[:, OWN], _scale(found, found.batch), known
        constant = np.broadcast_to(np.stack(list(known.values())), (len(own), len(known), own.shape[1]))
        self.sample = Sample(np.concatenate([own[:, None], own[:, None], constant], axis=1))
        _, self.own, *rows = np.eye(2 + len(known))
        self.rows = dict(zip(known, rows, strict=True))

    def left(self, names: Names) -> Interval:
        """As `_exactly_left`, with its interval."""
        if names:
            return fitted(self.sample, self.own, self._of(names), ERROR_RATE).misfit
        square = self.sample.interval(norm(self.own), ERROR_RATE, self.sample.pairs(self.own))
        return Interval(*(math.sqrt(max(one, 0.0)) / self.scale for one in (square.value, square.low, square.high)))

    def terms(self, names: Names) -> dict[str, Interval]:
        """Return the coefficients of the best combination."""
        return fitted(self.sample, self.own, self._of(names), ERROR_RATE).terms if names else {}

    def apart(self, names: Names) -> bool:
        """Return True if no name is a combination of the others here."""
        return len(independent({name: self.known[name] for name in names})) == len(names)

    def square(self, names: Names) -> float:
        """Return the square of what names leave."""
        return self.sample.estimate(misfit(self.own, np.stack(list(self._of(names).values()))))[0]

    def surely_farther(self, names: Names, others: Names) -> bool:
        """Return True if others surely leave more than names do."""
        one, other = (misfit(self.own, np.stack(list(self._of(each).values()))) for each in (names, others))
        return self.sample.interval(lambda products: other(products) - one(products), ERROR_RATE).low > 0

    def _of(self, names: Names) -> dict[str, np.ndarray]:
        return {name: self.rows[name] for name in names}


def _nearest(drawn: Sequence[_Drawn]) -> list[Names]:
    """No name, one name and two names that may be the gradient in all instances, if no others may be it as well."""
    if max(one.left(()).high for one in drawn) <= MARGIN:
        return [()]
    found = []
    for count in range(1, TERMS + 1):
        # In a single instance names may depend on each other.
        apart = [names for names in combinations(drawn[0].rows, count) if all(one.apart(names) for one in drawn)]
        squares = {names: sum(one.square(names) for one in drawn) for names in apart}
        best = min(squares, key=lambda names: squares[names])
        near = [names for names in squares if max(one.square(names) for one in drawn) <= MARGIN**2]
        if best in near and all(
            any(one.surely_farther(best, names) for one in drawn) for names in near if names != best
        ):
            found.append(best)
    return found


def _worst(intervals: Iterable[Interval]) -> Interval:
    each = list(intervals)
    return Interval(*(max(getattr(one, end) for one in each) for end in ("value", "low", "high")))


def _rate(exact: Mapping[int, float], drawn: Mapping[int, Interval], near: float) -> float | None:
    """Return a of the law a/B that is fitted to enumerated sizes, 0 if nothing is left at any; None if it is refuted.

    It is if at one of the sampled sizes surely SLACK times more is left.
    """
    if max(exact.values(), default=1.0) <= near and all(one.low <= near for one in drawn.values()):
        return 0.0
    if len(exact) < LEAST or min(exact.values()) <= 0:
        return None
    factor = math.exp(sum(math.log(size * left) for size, left in exact.items()) / len(exact))
    return factor if all(one.low <= SLACK * factor / size for size, one in drawn.items()) else None


def _proportional(terms: Sequence[Mapping[str, Interval]]) -> bool:
    """True if coefficients are those of one combination in all instances, up to a factor of each."""
    values = np.array([[one.value for one in each.values()] for each in terms])
    shares = values / np.linalg.norm(values, axis=1, keepdims=True) if values.size else values
    return bool(np.all(np.abs(shares - shares[0]) <= MARGIN))


def _moved(before: Mapping[str, Interval], now: Mapping[str, Interval]) -> bool:
    """True if a coefficient surely moved by more than MARGIN of itself between two sizes."""
    gaps = {name: max(before[name].low - one.high, one.low - before[name].high) for name, one in now.items()}
    return any(gap > MARGIN * abs(now[name].value) for name, gap in gaps.items())


def _beside_reward(loss: Loss, instances: Sequence[Instance], known: Sequence[Known]) -> list[float]:
    """The ratio of the two coefficients in the whole loss, where it is farthest from one in any instance."""
    each = []
    for instance, own in zip(instances, known, strict=True):
        drawn = _Drawn(_sampled(whole(loss, 1.0), instance, SAMPLED[-1]), own)
        each.append(drawn.sample.interval(_ratio(drawn.own, *(drawn.rows[name] for name in REWARDED)), ERROR_RATE))
    low, high = min(one.low for one in each), max(one.high for one in each)
    return [max((one.value for one in each), key=lambda value: abs(value - 1)), low, high]


def _ratio(own: np.ndarray, penalty: np.ndarray, reward: np.ndarray) -> Statistic:
    """The coefficient of a penalty over that of a reward, whose gradient is that of a gain."""
    solved = fit(own, np.stack([penalty, reward]))

    def ratio(products: np.ndarray) -> np.ndarray:
        found: np.ndarray = -solved(products)[..., 0] / solved(products)[..., 1]
        return found

    return ratio
