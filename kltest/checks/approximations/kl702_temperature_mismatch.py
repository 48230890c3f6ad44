"""KL702: log-probs are taken at a temperature that the tokens were not drawn at.

A loss that divides the policy's log-probs (or logits) by τ is a known loss of the divided ones, so it follows a named
gradient when its input comes multiplied by τ. The policy's, the reference's, the sampler's side and several at once are
tried, each with a one-dimensional search over τ, in bandits, in which a wrong temperature always shows.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter

import numpy as np
import torch

from kltest.checks.check import shared
from kltest.environments import Instance
from kltest.environments.policies import softmax_gradient
from kltest.errors import KltestError
from kltest.identify.findings import Combination, Findings, Row
from kltest.identify.instances import instances
from kltest.moments.differentiate import differentiate
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout
from kltest.truth import gradient, render

# Logarithms of temperatures from 1/6 to 6; no minimum that matters is narrower than a step of the grid.
GRID = np.linspace(-1.8, 1.8, 25)
# A smaller logarithm is no temperature.
NONE = 1e-3
# At this distance from a temperature, in its logarithm, more than a hundred times the limits below is left.
APART = 0.05
NAMES = ("reverse_kl", "forward_kl", "squared_log_ratio", "chi_square", "total_variation")
SIDES = {
    "the policy's": ("logits", "logp"),
    "the reference's": ("ref_logits", "ref_logp"),
    "the policy's and the reference's": ("logits", "logp", "ref_logits", "ref_logp"),
    "the sampler's": ("old_logits", "old_logp"),
    "the policy's and the sampler's": ("logits", "logp", "old_logits", "old_logp"),
    "all": ("logits", "logp", "ref_logits", "ref_logp", "old_logits", "old_logp"),
}


def explains(row: Row, findings: Findings) -> str | None:
    """Describe the temperature that explains a row that is unnamed, or named with an entropy in it."""
    unnamed = row.identified is None or "entropy" in row.identified
    return _tempered(findings) if row.wrong and unnamed else None


@shared
def _tempered(findings: Findings) -> str | None:
    if findings.observed.coupled or findings.observed.blocked:
        return None
    try:
        return _Bandits(findings).tempered()
    except KltestError:  # a loss that cannot be called so proves nothing
        return None


class _Bandits:
    """The loss on all rollouts of all instances of a bandit, in one batch."""

    def __init__(self, findings: Findings) -> None:
        self.loss = findings.loss
        self.drawn = instances("bandit", findings.seed)
        self.mean = findings.observed.reduction != "sum"
        self.base = _together(self.drawn, findings.seed)
        self.weights = [np.exp(instance.policy[0]) for instance in self.drawn]
        rollout = self.base.replace()
        self.loss(rollout)
        self.read = frozenset(rollout.accessed)
        single = findings.measure.alone("bandit", "current")
        self.with_entropy = single is not None and "entropy" in (single.identified or {})
        self.limit = TOLERANCES[findings.observed.dtype].search

    def tempered(self) -> str | None:
        """Describe the temperature, and the named gradient behind it, of the first side that has one."""
        if self._left((), 0.0) < self.limit:
            return None
        sides: dict[tuple[str, ...], str] = {}
        for side, fields in SIDES.items():
            read = tuple(field for field in fields if field in self.read)
            sides.setdefault(read, side)
            sides.setdefault(tuple(field for field in read if "logits" in field), side)
        for fields, side in sides.items():
            log_temperature = self._undone(fields) if fields else None
            if log_temperature is not None and (not self.with_entropy or self._normalised(fields)):
                _, behind = self._nearest(fields, log_temperature)
                return (
                    f"{side} log-probs are divided by a temperature of {np.exp(log_temperature):.4g}; multiplied by it "
                    f"again, the gradient is {render(behind)}"
                )
        return None

    def _undone(self, fields: tuple[str, ...]) -> float | None:
        """Search for the logarithm of a temperature at which the gradient is named once it is undone."""
        from scipy.optimize import minimize_scalar  # slow to import, and most losses never come here

        def left(log_temperature: float) -> float:
            return self._left(fields, log_temperature)

        step = GRID[1] - GRID[0]
        for start in _valleys(left):
            around = (start - step, start + step)
            found = minimize_scalar(left, bounds=around, method="bounded", options={"xatol": 1e-11})
            # Beyond a kink any factor may fit: a little away, more has to be left.
            isolated = min(left(found.x - APART), left(found.x + APART)) > self.limit
            if found.fun < self.limit and abs(found.x) > NONE and isolated:
                return float(found.x)
        return None

    def _normalised(self, fields: tuple[str, ...]) -> bool:
        """Return True if a constant added to log-probs changes nothing: log π/τ − log ref would be an entropy bonus."""
        if "logits" not in fields[0]:
            return False
        moved = self.base.replace(**{field: self.base.peek(field).detach() + 1.0 for field in fields})
        one, other = (float(self.loss(batch).objective.detach()) for batch in (self.base.replace(), moved))
        return abs(one - other) <= self.limit * abs(one)

    def _left(self, fields: tuple[str, ...], log_temperature: float) -> float:
        return self._nearest(fields, log_temperature)[0]

    def _nearest(self, fields: tuple[str, ...], log_temperature: float) -> tuple[float, Combination]:
        """(relative residual, combination) of the best multiple of one named gradient, on all instances together.

        The fields are multiplied by the temperature before the loss is called.
        """
        found = self._gradients(dict.fromkeys(fields, float(np.exp(log_temperature))))
        size = float(np.linalg.norm(found))
        candidates: list[tuple[float, Combination]] = [(1.0, {"zero": 1.0})]
        for name, column in _named(self.drawn).items() if size else ():
            coefficient = float(found @ column / (column @ column))
            candidates.append((float(np.linalg.norm(found - coefficient * column)) / size, {name: coefficient}))
        return min(candidates, key=itemgetter(0))

    def _gradients(self, factors: dict[str, float]) -> np.ndarray:
        """Expected gradients of all instances, one after the other, with fields multiplied by factors."""
        changed = {field: factor * self.base.peek(field).detach() for field, factor in factors.items()}
        called = differentiate(
            self.loss, self.base.replace(**changed), None, float(len(self.base)) if self.mean else 1.0
        )
        found = []
        for number, weights in enumerate(self.weights):
            rows_of = slice(number * len(weights), (number + 1) * len(weights))
            table_of = np.zeros(len(weights))
            if called.logp is not None:
                table_of += factors.get("logp", 1.0) * weights * called.logp[rows_of, 0]
            if called.logits is not None:
                table_of += factors.get("logits", 1.0) * weights @ called.logits[rows_of, 0]
            found.append(softmax_gradient(table_of[None], self.drawn[number].policy)[0])
        return np.concatenate(found)


def _together(drawn: tuple[Instance, ...], padding: int) -> Rollout:
    """All rollouts of all instances as one batch."""
    parts = [Rollout.of(instance, padding=padding) for instance in drawn]
    fields = {name: torch.cat([part.peek(name).detach() for part in parts]) for name in parts[0]}
    fields["group"] = torch.arange(len(parts)).repeat_interleave(len(parts[0]))
    return Rollout(fields)


@lru_cache(maxsize=16)
def _named(drawn: tuple[Instance, ...]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([gradient(name, instance)[0] for instance in drawn]) for name in NAMES}


def _valleys(left: Callable[[float], float], most: int = 2) -> list[float]:
    """Lowest points of the grid among those that are not above their neighbours."""
    seen = np.array([left(float(point)) for point in GRID])
    beside = np.pad(seen, 1, constant_values=np.inf)
    lower = np.flatnonzero((seen <= beside[:-2]) & (seen <= beside[2:]))
    return GRID[sorted(lower, key=seen.__getitem__)[:most]].tolist()


def at_a_temperature(logits, ref_logits):
    log_probs = (logits / 0.5).log_softmax(-1)
    return (log_probs.exp() * (log_probs - ref_logits)).sum(-1)
