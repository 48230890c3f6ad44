"""Log-ratios of policy and reference that are extreme and legal: overflow, and intervals in which nothing happens.

Every log-prob is at most 0, rows of logits are normalised, and the sampler is the policy, so that importance ratios are
1 and only u = logp − ref_logp is extreme. One rollout has that u; the others of its batch are mild, so that a loss that
couples rollouts can be called.

A dead zone is an interval in which the gradient is exactly zero (of a value in the reward: in which the value does not
change) although it is not small beside it. A weight that fades and underflows in the end, as a sigmoid's, is not
clamped; a single zero between others, as that of k2 at u = 0, is no interval. In a plateau the gradient stands still
and is not zero. Total variation is nothing but that: it is no mistake unless the declared gradient goes on to grow
there, which worlds with distant policies tell (kltest.checks.far_apart).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kltest.checks import far_apart as distant
from kltest.checks.call_once import look
from kltest.checks.check import Found
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.loss.outcome import Loss
from kltest.rollout import Rollout

SIZES = (5.0, 30.0, 100.0, 1000.0)
LENGTH, VOCABULARY = 3, 4
LIKELY = -0.5
MILD = (0.3, -0.4, 0.2, -0.1, 0.4, -0.2)
# From a thousandth to a thousand on both sides, each a quarter further than the one before: no zone that is open to
# one side is missed, nor one that is a quarter of its distance wide.
STEPS = np.geomspace(1e-3, 1e3, 63)
# Smaller log-ratios are lost where log-probs are rounded to that type, which is KL508's to tell.
COARSE = {"bfloat16": 0.05, "float16": 0.01}
# Beside the usual gradient; what fades to rounding on its way to zero is no clamp.
FADED = 1e-9
USUAL = 2.0
HALVINGS = 40
# A token of which the reference thinks a millionth of what the policy does is as far as there is anything to pull at,
# and probabilities near 1e-8 are where code begins to guard against zero. A sequence's log-ratio goes on to grow.
MET = {"token": 15.0, "sequence": 30.0}
Level = Literal["gradient", "value"]


def overflow(findings: Findings) -> Found | None:
    """Whether value and gradient are finite at log-ratios up to a thousand."""
    loss = findings.loss.for_experiments()
    companions = _companions(findings)
    words = []
    for size in SIZES:
        for u in (size, -size):
            seen = look(loss, _batch([u], companions, length=1))
            value, gradient = float(seen.value.sum()), [g[seen.live].flatten() for g in seen.gradients.values()]
            bad = [f"the value is {value}"] if not np.isfinite(value) else []
            flat = torch.cat(gradient) if gradient else torch.zeros(1)
            if not torch.isfinite(flat).all():
                bad.append(f"the gradient is {flat[~torch.isfinite(flat)][0].item()}")
            if bad:
                words.append(f"at u = {_signed(u)} {' and '.join(bad)}")
    if not words:
        return None
    precision = f" (in {seen.outcome.dtype})" if seen.outcome.dtype != "float64" else ""
    return Found(f"With u = logp − ref_logp: {'; '.join(words)}{precision}.")


def dead_zones(findings: Findings) -> Found | None:
    """The intervals of log-ratio in which the gradient is zero, or the value in the reward constant.

    Where there are none, the plateaus of a gradient that is not the declared one of distant policies.
    """
    scan = scan_of(findings)
    happens = "the gradient is exactly zero" if scan.what == "gradient" else "the value does not change"
    if zones := scan.zones():
        return Found(scan.words(zones, happens))
    if (away := findings.once(distant.differs)) and (plateaus := scan.near_plateaus()):
        return Found(f"{scan.words(plateaus, 'the gradient stays what it is at the bound')} {away.words}")
    return None


def scan_of(findings: Findings) -> Scan:
    """What looks for dead zones and plateaus of this loss."""
    what: Level = "gradient" if findings.placement == "loss" else "value"
    finest = COARSE.get(findings.observed.dtype, 0.0)
    return Scan(findings.loss.for_experiments(), what, _companions(findings), finest)


@dataclass(frozen=True)
class Zone:
    """An interval of u with nothing but `level` in it, open to a side where the end is infinite."""

    low: float
    high: float
    level: float

    def __str__(self) -> str:
        if self.high == np.inf:
            return f"u > {_rounded(self.low)}"
        if self.low == -np.inf:
            return f"u < {_rounded(self.high)}"
        return f"{_rounded(self.low)} < u < {_rounded(self.high)}"


class Scan:
    """Looks at one rollout of one token whose log-ratio goes through the grid; the others stay mild."""

    def __init__(self, loss: Loss, what: Level, companions: int, finest: float = 0.0) -> None:
        self.loss, self.what, self.companions = loss, what, companions
        steps = STEPS[finest <= STEPS]
        self.grid = np.concatenate([-steps[::-1], [0.0], steps])

    def zones(self) -> list[Zone]:
        """The dead intervals, their ends found by halving."""
        return self._intervals(lambda level: self.what == "value" or level == 0)

    def plateaus(self) -> list[Zone]:
        """The intervals in which the gradient stands still and is not zero."""
        return self._intervals(lambda level: self.what == "gradient" and level != 0)

    def near_plateaus(self) -> list[Zone]:
        """Those that begin at log-ratios which are met, and not where a logarithm or an exponential is guarded."""
        plateaus = self.plateaus()
        reach = MET["sequence" if self.of_sequences(plateaus) else "token"]
        return [zone for zone in plateaus if min(abs(zone.low), abs(zone.high)) <= reach]

    def words(self, zones: list[Zone], happens: str) -> str:
        of = "summed over the sequence" if self.of_sequences(zones) else "of a token"
        return f"With u = logp − ref_logp {of}, {happens} for {' and for '.join(map(str, zones))}."

    def _intervals(self, wanted: Callable[[float], bool]) -> list[Zone]:
        # All in one call first, which is enough where no two levels are equal.
        with suppress(KltestError):
            together = self._levels(self.grid)
            if np.isfinite(together).all() and not any(wanted(together[run[0]]) for run in self._equal(together)):
                return []
        return [self._ends(self._one_by_one, *run) for run in self._runs(self._one_by_one, wanted)]

    @cached_property
    def _one_by_one(self) -> np.ndarray:
        """A call for each: a clamp on the batch's mean is not to be seen through the other rollouts."""
        return np.array([self.level(u) for u in self.grid])

    def of_sequences(self, zones: list[Zone]) -> bool:
        """Whether three tokens of 0.6 of an outer zone's end, which sum to 1.8 of it, lie in the zone."""
        for zone in zones:
            if np.isinf(zone.low) != np.isinf(zone.high):
                end = zone.high if np.isinf(zone.low) else zone.low
                if end != 0:
                    near, inside = (self.level(0.6 * end * part, LENGTH) for part in (0.999, 1.0))
                    return inside == zone.level if self.what == "gradient" else near == inside
        return False

    def level(self, u: float, length: int = 1) -> float:
        return float(self._levels(np.array([u]), length)[0])

    def _levels(self, log_ratios: np.ndarray, length: int = 1) -> np.ndarray:
        seen = look(self.loss, _batch(log_ratios.tolist(), self.companions, length=length))
        if self.what == "gradient":
            return seen.row_sizes[: len(log_ratios)].numpy()
        value = seen.value
        value = value.sum(dim=1) if value.dim() == 2 else value
        return value[: len(log_ratios)].numpy() if value.dim() == 1 else value.reshape(1).numpy()

    def _runs(self, levels: np.ndarray, wanted: Callable[[float], bool]) -> list[tuple[int, int]]:
        """(first, last) of the runs of equal levels of the kind that is wanted that did not fade."""
        usual = levels[np.abs(self.grid) <= USUAL]
        scale = np.nanmax(np.abs(usual - (usual.mean() if self.what == "value" else 0.0)))
        if not scale > 0:
            return []
        runs = [run for run in self._equal(levels) if wanted(levels[run[0]])]
        return [run for run in runs if self._clamped(levels, *run, FADED * scale)]

    def _equal(self, levels: np.ndarray) -> list[tuple[int, int]]:
        """(first, last) of the runs of equal levels."""
        runs, first = [], 0
        for i in range(1, len(levels) + 1):
            if i < len(levels) and levels[i] == levels[first] and np.isfinite(levels[i]):
                continue
            if i - first > 1 and np.isfinite(levels[first]):
                runs.append((first, i - 1))
            first = i
        return runs

    @staticmethod
    def _clamped(levels: np.ndarray, first: int, last: int, small: float) -> bool:
        """Whether the level beside the run is clearly another one, so that it did not fade."""
        beside = [levels[i] for i in (first - 1, last + 1) if 0 <= i < len(levels)]
        return any(not abs(level - levels[first]) <= small for level in beside)

    def _ends(self, levels: np.ndarray, first: int, last: int) -> Zone:
        flat = float(levels[first])
        grid = self.grid

        def dead(u: float) -> bool:
            return self.level(u) == flat

        low = -np.inf if first == 0 else self._halve(grid[first], grid[first - 1], dead)
        high = np.inf if last == len(grid) - 1 else self._halve(grid[last], grid[last + 1], dead)
        return Zone(low, high, flat)

    @staticmethod
    def _halve(inside: float, outside: float, dead: Callable[[float], bool]) -> float:
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if dead(middle) else (inside, middle)
        return inside


def _companions(findings: Findings) -> int:
    """As many mild rollouts beside the one as make two groups of the size that the loss is graded with."""
    size = findings.measure.sizes.each[0] if findings.measure.sizes.grouped else 2
    return 2 * size - 1


def _batch(log_ratios: list[float], companions: int, *, length: int) -> Rollout:
    """Rollouts whose `length` tokens have the given log-ratios each, then the mild ones of three tokens."""
    count = len(log_ratios)
    u = torch.zeros(count + companions, LENGTH, dtype=torch.float64)
    mask = torch.ones_like(u)
    u[:count] = torch.tensor(log_ratios, dtype=torch.float64)[:, None]
    u[:count, length:], mask[:count, length:] = 0.0, 0.0
    mild = torch.tensor(MILD).double().repeat(companions * LENGTH)
    u[count:] = mild[: companions * LENGTH].reshape(companions, LENGTH)
    # The likelier of the two has the log-prob −1/2, so that the other one's is legal.
    logp, ref_logp = LIKELY + u.clamp(max=0.0), LIKELY - u.clamp(min=0.0)
    tokens = torch.ones(u.shape, dtype=torch.int64)
    rows = torch.arange(len(u))
    reward = (rows % 2).double()
    group = rows // ((companions + 1) // 2)
    same = (group[:, None] == group[None, :]).double()
    logits = _logits(logp, (0.5, 0.3, 0.2))
    return Rollout(
        {
            "logp": logp,
            "ref_logp": ref_logp,
            "old_logp": logp.clone(),
            "mask": mask,
            "tokens": tokens,
            "logits": logits,
            "ref_logits": _logits(ref_logp, (0.2, 0.3, 0.5)),
            "old_logits": logits.clone(),
            "reward": reward,
            "advantage": reward - same @ reward / same.sum(dim=1),
            "group": group,
        }
    )


def _logits(logp: Tensor, others: tuple[float, ...]) -> Tensor:
    """Normalised rows (B, T, V) in which token 1 has the given log-prob and the others share what is left."""
    left = torch.log(-torch.expm1(logp))[..., None] + torch.tensor(others).double().log()
    return torch.cat([left[..., :1], logp[..., None], left[..., 1:]], dim=-1)


def _signed(number: float) -> str:
    return f"{number:+g}".replace("-", "−").replace("+", "")


def _rounded(number: float) -> str:
    return f"{number:.3g}".replace("-", "−")
