"""KL504: in an interval of log-ratios the gradient is exactly zero, or stands still while it should grow.

A dead zone is an interval in which the gradient is exactly zero (for a value in the reward: the value does not change)
although it is not small at its edge. A weight that fades and underflows in the end, as a sigmoid's, is not clamped. A
single zero between others, as k2's at u = 0, is no interval. On a plateau the gradient is constant and not zero. Total
variation is a plateau everywhere: a plateau is a mistake only if the declared gradient goes on to grow there, which
bandits with policy and reference far apart tell (kltest.checks.stress).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np

from kltest.checks.batches import LENGTH, batch_of, companions
from kltest.checks.check import Found, signed
from kltest.checks.hygiene.kl507_non_deterministic import not_comparable
from kltest.checks.stress import wrong
from kltest.environments import Instance, bandit
from kltest.errors import KltestError
from kltest.identify.findings import Findings, shared
from kltest.moments.differentiate import LossExperiment
from kltest.moments.tolerances import TOLERANCES
from kltest.names import SUPPORT_SIZE
from kltest.rollout import Rollout

# |u| from a thousandth to a thousand, each a quarter larger than the one before: zones that are open to one side are
# always met, and so are zones whose width is a quarter of their distance from 0.
STEPS = np.geomspace(1e-3, 1e3, 63)
# Relative to the gradient at |u| ≤ USUAL: a level that fades to rounding on its way to zero is no clamp.
FADED = 1e-9
USUAL = 2.0
HALVINGS = 40
# Beyond it an exponential overflows in float64, and the level is not finite.
FINITE = 700.0
# The largest |u| at which a plateau counts. For a token to which the reference gives a millionth of the policy's
# probability nothing is left to pull at, and near 1e-8 code begins to guard against zero. A sequence's log-ratio goes
# on to grow.
MET = {"token": 15.0, "sequence": 30.0}
# The largest |u| of a token, and of a whole rollout, that training is sure to reach; ends of zones are found to
# rounding.
USUAL_IN_TRAINING = {"token": 5.0 + 1e-6, "sequence": 10.0 + 1e-6}
# Next-token distributions that are drawn, of a loss that reads such, in turn mild and near the reference: there a sum
# over its likeliest tokens is as often negative as not.
DISTRIBUTIONS, DISTANCES = 64, (2.0, 0.25)
Quantity = Literal["gradient", "value"]

moot = not_comparable


@shared
def examine(findings: Findings) -> Found | None:
    """Report the dead zones; if there are none, the plateaus of a gradient that is not the declared one far away."""
    what: Quantity = "gradient" if findings.placement == "loss" else "value"
    if what == "gradient" and (found := _dead_distributions(findings)):
        return found
    # Log-ratios that rounding of the log-probs loses are KL508's.
    finest = TOLERANCES[findings.observed.dtype].log_ratio
    scan = _Levels(_experiment(findings), what, companions(findings), finest)
    happens = "the gradient is exactly zero" if what == "gradient" else "the value does not change"
    if zones := scan.intervals(dead=True):
        return scan.found(zones, happens)
    if what == "value":
        return None
    away, plateaus = wrong(findings, "far apart"), scan.intervals(dead=False)
    # Those that begin at log-ratios met in training, not where a logarithm or an exponential is guarded.
    reach = MET["sequence" if scan.of_sequences(plateaus) else "token"]
    plateaus = [zone for zone in plateaus if zone.nearest <= reach]
    # Rollouts that the reference prefers by far have no weight in a bandit; many small steps of a long one lead there.
    bounded = scan.of_sequences(plateaus) and min(zone.nearest for zone in plateaus) > USUAL
    if not plateaus or not (away or bounded):
        return None
    return scan.found(plateaus, "the gradient stays what it is at the bound", away)


def _experiment(findings: Findings) -> LossExperiment:
    """Return calls of the loss; of means over draws those of few, since only equal ones are looked for."""
    return (findings.measure.rough or findings.measure).experiment()


def _dead_distributions(findings: Findings) -> Found | None:
    """Report that the gradient is exactly zero at some next-token distributions: a clamp of a sum over tokens.

    Each is drawn for a single token, none equal to the reference's, so that no rollout is needed to meet them.
    """
    if "logits" not in findings.loss.takes or findings.observed.blocked:
        return None
    actions = SUPPORT_SIZE + 2
    experiment, dead = _experiment(findings), 0
    for place, child in enumerate(np.random.SeedSequence([findings.seed, actions]).spawn(DISTRIBUTIONS)):
        drawn = Instance.draw(bandit(actions), child, distance=DISTANCES[place % len(DISTANCES)])
        rollout = Rollout.of(drawn, padding=findings.seed)
        dead += not bool(experiment.call(rollout).row_sizes.any())
    if not 0 < dead < DISTRIBUTIONS:
        return None
    return Found(
        f"At {dead} of {DISTRIBUTIONS} drawn next-token distributions ({dead / DISTRIBUTIONS:.0%}), none of them the "
        "reference's, the gradient is exactly zero. A sum over the likeliest tokens is often negative, and a clamp at "
        "0 leaves no gradient there: take all other tokens as one (forward-kl-topk-tail, reverse-kl-topk-tail).",
        level="error",
    )


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


class _Levels:
    """Levels (gradient size or value) of one rollout of one token whose log-ratio goes through the grid."""

    def __init__(self, experiment: LossExperiment, what: Quantity, companions: int, finest: float = 0.0) -> None:
        self.experiment, self.what, self.companions = experiment, what, companions
        steps = STEPS[finest <= STEPS]
        self.grid = np.concatenate([-steps[::-1], [0.0], steps])
        self._keep_what_runs()

    def _keep_what_runs(self) -> None:
        """Leave out the largest log-ratios, as long as the loss fails there; KltestError if it fails everywhere."""
        while True:
            try:
                self.level(self.grid[0]), self.level(self.grid[-1])
                return
            except KltestError:
                if len(self.grid) <= 3:
                    raise
                self.grid = self.grid[1:-1]

    def intervals(self, *, dead: bool) -> list[Zone]:
        """Dead intervals, or those in which a gradient is constant and not zero; their ends found by bisection."""

        def wanted(level: float) -> bool:
            return self.what == "value" or (level == 0) == dead

        # One call of the whole grid is enough if no two levels are equal. Rewards alternate, and with them the level of
        # a clamped advantage.
        with suppress(KltestError):
            together = self._levels(self.grid)
            parts = together, together[::2], together[1::2]
            finite = np.isfinite(together[np.abs(self.grid) < FINITE]).all()
            if finite and not any(wanted(part[run[0]]) for part in parts for run in self._equal(part)):
                return []
        return [
            Zone(self._end(first, first - 1), self._end(last, last + 1), float(self._alone[first]))
            for first, last in self._runs(wanted)
        ]

    def found(self, zones: list[Zone], happens: str, more: str = "") -> Found:
        """Describe zones: an error if one begins at log-ratios that training reaches."""
        of, kind = ("summed over the sequence", "sequence") if self.of_sequences(zones) else ("of a token", "token")
        words = f"With u = logp − ref_logp {of}, {happens} for {' and for '.join(map(str, zones))}."
        reached = min(zone.nearest for zone in zones) <= USUAL_IN_TRAINING[kind]
        return Found(f"{words} {more}".rstrip(), level="error" if reached else "warning")

    @cached_property
    def _alone(self) -> np.ndarray:
        """Levels from a call each, so that a clamp on the batch's mean is not hidden by the other rollouts."""
        return np.array([self.level(u) for u in self.grid])

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
        if self.what == "gradient":
            return result.row_sizes[: len(log_ratios)].numpy()
        value = result.value
        value = value.sum(dim=1) if value.dim() == 2 else value
        return value[: len(log_ratios)].numpy() if value.dim() == 1 else value.reshape(1).numpy()

    def _runs(self, wanted: Callable[[float], bool]) -> list[tuple[int, int]]:
        """(first, last) of the runs of equal levels that are wanted and did not fade."""
        levels = self._alone
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

    def _end(self, within: int, outside: int) -> float:
        """The end of an interval between two points of the grid, by bisection; infinite at the end of the grid."""
        if not 0 <= outside < len(self.grid):
            return np.copysign(np.inf, outside - within)
        ends = self.grid[[within, outside]]
        for _ in range(HALVINGS):
            equal = self.level(ends.mean()) == self._alone[within]
            ends[0 if equal else 1] = ends.mean()
        return float(ends[0])


def clamped(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    return (log_ratio.square() / 2).clamp(max=10.0)
