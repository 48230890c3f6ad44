"""KL504: in an interval of log-ratios the gradient is exactly zero, or stands still while it should grow.

A dead zone is an interval in which the gradient is exactly zero (for a value in the reward: the value does not change)
although it is not small at its edge. A weight that fades and underflows in the end, as a sigmoid's, is not clamped. A
single zero between others, as k2's at u = 0, is no interval. On a plateau the gradient is constant and not zero. Total
variation is a plateau everywhere: a plateau is a mistake only if the declared gradient goes on to grow there, which
bandits with policy and reference far apart tell (kltest.checks.beyond).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np

from kltest.checks.beyond import differs
from kltest.checks.check import Found, shared, signed
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.checks.hygiene.log_ratios import LENGTH, batch_of, companions
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.moments.differentiate import Experiment
from kltest.moments.tolerances import TOLERANCES

# |u| from a thousandth to a thousand, each a quarter larger than the one before: zones that are open to one side are
# always met, and so are zones whose width is a quarter of their distance from 0.
STEPS = np.geomspace(1e-3, 1e3, 63)
# Relative to the gradient at |u| ≤ USUAL: a level that fades to rounding on its way to zero is no clamp.
FADED = 1e-9
USUAL = 2.0
HALVINGS = 40
# If rows of a call give what they give alone at every STRIDE-th log-ratio and beside equal levels, the others are not
# called alone; then DEPTH halvings share a call.
STRIDE, DEPTH = 4, 6
# Log-ratios of the grid above 700 in absolute value, where an exponential overflows, on both sides; a few to spare.
OVERFLOWING = 8
# The largest |u| at which a plateau counts. For a token to which the reference gives a millionth of the policy's
# probability nothing is left to pull at, and near 1e-8 code begins to guard against zero. A sequence's log-ratio goes
# on to grow.
MET = {"token": 15.0, "sequence": 30.0}
# The largest |u| of a token, and of a whole rollout, that training is sure to reach; ends of zones are found to
# rounding.
USUAL_IN_TRAINING = {"token": 5.0 + 1e-6, "sequence": 10.0 + 1e-6}
Quantity = Literal["gradient", "value"]

moot = not_comparable


@shared
def examine(findings: Findings) -> Found | None:
    """Report the dead zones; if there are none, the plateaus of a gradient that is not the declared one far away."""
    what: Quantity = "gradient" if findings.placement == "loss" else "value"
    # Log-ratios that rounding of the log-probs loses are KL508's.
    finest = TOLERANCES[findings.observed.dtype].log_ratio
    scan = Scan(findings.measure.experiment(), what, companions(findings), finest)
    happens = "the gradient is exactly zero" if what == "gradient" else "the value does not change"
    if zones := scan.zones():
        return scan.found(zones, happens)
    away, plateaus = differs(findings), scan.plateaus()
    # Those that begin at log-ratios met in training, not where a logarithm or an exponential is guarded.
    reach = MET["sequence" if scan.of_sequences(plateaus) else "token"]
    plateaus = [zone for zone in plateaus if zone.nearest <= reach]
    # Rollouts that the reference prefers by far have no weight in a bandit; many small steps of a long one lead there.
    bounded = scan.of_sequences(plateaus) and min(zone.nearest for zone in plateaus) > USUAL
    if not plateaus or not (away or bounded):
        return None
    return scan.found(plateaus, "the gradient stays what it is at the bound", away)


class Zone(NamedTuple):
    """An interval of u on which the level is constant, open to a side whose end is infinite."""

    low: float
    high: float
    level: float

    @property
    def nearest(self) -> float:
        """Least |u| in the interval."""
        return 0.0 if self.low <= 0 <= self.high else min(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        if self.high == np.inf:
            return f"u > {signed(self.low, 3)}"
        if self.low == -np.inf:
            return f"u < {signed(self.high, 3)}"
        return f"{signed(self.low, 3)} < u < {signed(self.high, 3)}"


class Scan:
    """Levels (gradient size or value) of one rollout of one token whose log-ratio goes through the grid."""

    def __init__(self, experiment: Experiment, what: Quantity, companions: int, finest: float = 0.0) -> None:
        self.experiment, self.what, self.companions, self.dtype = experiment, what, companions, "float64"
        steps = STEPS[finest <= STEPS]
        self.grid = np.concatenate([-steps[::-1], [0.0], steps])

    def zones(self) -> list[Zone]:
        """Dead intervals, their ends found by bisection."""
        return self._intervals(lambda level: self.what == "value" or level == 0)

    def plateaus(self) -> list[Zone]:
        """Intervals in which the gradient is constant and not zero."""
        return self._intervals(lambda level: self.what == "gradient" and level != 0)

    def found(self, zones: list[Zone], happens: str, more: str = "") -> Found:
        """Describe zones: an error if one begins at log-ratios that training reaches."""
        of, kind = ("summed over the sequence", "sequence") if self.of_sequences(zones) else ("of a token", "token")
        words = f"With u = logp − ref_logp {of}, {happens} for {' and for '.join(map(str, zones))}."
        reached = min(zone.nearest for zone in zones) <= USUAL_IN_TRAINING[kind]
        return Found(f"{words} {more}".rstrip(), level="error" if reached else "warning")

    def _intervals(self, wanted: Callable[[float], bool]) -> list[Zone]:
        # One call for all is enough if no two levels are equal, without the few log-ratios that overflow alone as well.
        with suppress(KltestError):
            together = self._levels(self.grid)
            infinite = self.grid[~np.isfinite(together)]
            if 0 < len(infinite) <= OVERFLOWING and not np.isfinite([self.level(u) for u in infinite]).any():
                together = self._levels(np.setdiff1d(self.grid, infinite))
            # Rewards alternate, and with them the level of a clamped advantage.
            parts = together, together[::2], together[1::2]
            if np.isfinite(together).all() and not any(wanted(p[run[0]]) for p in parts for run in self._equal(p)):
                return []
        return [self._ends(self._one_by_one, *run) for run in self._runs(self._one_by_one, wanted)]

    @cached_property
    def _one_by_one(self) -> np.ndarray:
        """Levels from a call each, so that a clamp on the batch's mean is not hidden by the other rollouts."""
        return np.array([self.level(u) for u in self.grid]) if self._in_one_call is None else self._in_one_call

    @cached_property
    def _in_one_call(self) -> np.ndarray | None:
        """Levels from one call of all log-ratios, if they stand for those from a call each; else None.

        They do if they are the same, up to a factor, among every other one of them and in some calls of one; around
        those few that are not, as where rounding leaves nothing of a level, each is called.
        """
        places = np.arange(len(self.grid))
        with suppress(KltestError):
            together = self._levels(self.grid)
            runs = self._equal(together)
            ends = [place for run in runs for place in (run[0] - 1, *run, run[1] + 1)]
            lone = {*places[::STRIDE].tolist(), *np.clip(ends, 0, places[-1]).astype(int).tolist()}
            alone = {place: self.level(self.grid[place]) for place in sorted(lone)}
            parts = [(part, self._levels(self.grid[part])) for part in (places[::2], places[1::2])]
            parts.append((np.array([*alone]), np.array([*alone.values()])))
            shares = [_share(together[part], found, self.dtype) for part, found in parts]
            other = np.concatenate([part[unlike] for (part, _), (_, unlike) in zip(parts, shares, strict=True)])
            unequal = any(len({alone[place] for place in lone if first <= place <= last}) > 1 for first, last in runs)
            if unequal or len(other) * STRIDE > len(places):
                return None
            near = (np.abs(places[:, None] - other) < STRIDE).any(axis=1)
            alone |= {int(place): self.level(self.grid[place]) for place in places[near] if place not in alone}
            levels = together * shares[-1][0]
            for run in runs:
                levels[run[0] : run[1] + 1] = alone[run[0]]
            levels[near] = [alone[place] for place in places[near]]
            return levels
        return None

    def of_sequences(self, zones: list[Zone]) -> bool:
        """Return True if three tokens whose sum lies in a zone, each nearer to 0 than the zone, count as in it."""
        for zone in zones:
            if zone.nearest > 0:
                ends = sorted((zone.low, zone.high), key=abs)
                each = ends[0] * min(1.8, (1 + abs(ends[1] / ends[0])) / 2) / LENGTH
                near, inside = (self.level(each * part, LENGTH) for part in (0.999, 1.0))
                return inside == zone.level if self.what == "gradient" else near == inside
        return False

    def level(self, u: float, length: int = 1) -> float:
        """Return what is scanned, the gradient or the value, at one log-ratio of each of `length` tokens."""
        return float(self._levels(np.array([u]), length)[0])

    def _levels(self, log_ratios: np.ndarray, length: int = 1) -> np.ndarray:
        result = self.experiment.call(batch_of(log_ratios.tolist(), self.companions, length=length))
        self.dtype = result.outcome.dtype
        if self.what == "gradient":
            return result.row_sizes[: len(log_ratios)].numpy()
        value = result.value
        value = value.sum(dim=1) if value.dim() == 2 else value
        return value[: len(log_ratios)].numpy() if value.dim() == 1 else value.reshape(1).numpy()

    def _runs(self, levels: np.ndarray, wanted: Callable[[float], bool]) -> list[tuple[int, int]]:
        """(first, last) of the runs of equal levels that are wanted and did not fade."""
        usual = levels[np.abs(self.grid) <= USUAL]
        scale = np.nanmax(np.abs(usual - (usual.mean() if self.what == "value" else 0.0)))
        if not scale > 0:
            return []
        # It did not fade if the level beside the run is clearly another one.
        wide = np.pad(levels, 1, mode="edge")
        beside = [(run, np.abs(wide[[run[0], run[1] + 2]] - levels[run[0]])) for run in self._equal(levels)]
        return [run for run, steps in beside if wanted(levels[run[0]]) and not (steps <= FADED * scale).all()]

    def _equal(self, levels: np.ndarray) -> list[tuple[int, int]]:
        """(first, last) of the runs of equal finite levels."""
        runs = (list(run) for _, run in groupby(range(len(levels)), key=levels.__getitem__))
        return [(run[0], run[-1]) for run in runs if len(run) > 1 and np.isfinite(levels[run[0]])]

    def _ends(self, levels: np.ndarray, first: int, last: int) -> Zone:
        low = -np.inf if first == 0 else self._halve(levels, first, first - 1)
        high = np.inf if last == len(levels) - 1 else self._halve(levels, last, last + 1)
        return Zone(low, high, float(levels[first]))

    def _halve(self, levels: np.ndarray, within: int, beyond: int) -> float:
        """The end of an interval between two points of the grid, by bisection."""
        ends = inside, outside = self.grid[within], self.grid[beyond]
        depths = [DEPTH] * (HALVINGS // DEPTH) + [HALVINGS % DEPTH] if self._in_one_call is not None else []
        for depth in depths:
            middles = _middles(inside, outside, depth)
            same, *found = self._levels(np.array([inside, *middles]))
            equal = dict(zip(middles, found, strict=True))
            for _ in range(depth):
                middle = (inside + outside) / 2
                inside, outside = (middle, outside) if equal[middle] == same else (inside, middle)
        if depths and self.level(inside) == levels[within] != self.level(outside):
            return float(inside)
        inside, outside = ends
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if self.level(middle) == levels[within] else (inside, middle)
        return float(inside)


def _share(levels: np.ndarray, others: np.ndarray, dtype: str) -> tuple[float, np.ndarray]:
    """The number by which most levels have to be multiplied to be the others, and for each if that leaves another."""
    usual = np.isfinite(levels) & (levels != 0) & np.isfinite(others) & (others != 0)
    share = float(np.median(others[usual] / levels[usual])) if usual.any() else 1.0
    return share, ~np.isclose(share * levels, others, rtol=TOLERANCES[dtype].rows, atol=0.0, equal_nan=True)


def _middles(inside: float, outside: float, depth: int) -> list[float]:
    """Every number that so many halvings of an interval may come to."""
    middle = (inside + outside) / 2
    return [middle, *_middles(inside, middle, depth - 1), *_middles(middle, outside, depth - 1)] if depth else []


def clamped(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (log_ratio.square() / 2).clamp(max=10.0)
