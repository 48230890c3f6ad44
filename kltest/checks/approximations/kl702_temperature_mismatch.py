"""KL702: log-probs are taken at a temperature that the tokens were not drawn at.

A loss that divides the policy's log-probs (or logits) by τ is a known loss of the divided ones, so it follows a named
gradient when its input comes multiplied by τ. The policy's, the reference's, the sampler's side and several at once are
tried, each with a one-dimensional search over τ, in bandits, in which a wrong temperature always shows.

If no named gradient turns up, the reference is set to the policy at a temperature. The gradient of a divergence
vanishes if both sides are equal, so a gradient that vanishes at another temperature than 1, and not at 1, compares a
tempered distribution with one that is not.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter

import numpy as np
import torch

from kltest.checks.check import shared
from kltest.checks.trainable import received
from kltest.environments import Instance
from kltest.environments.policies import softmax_gradient
from kltest.errors import KltestError
from kltest.identify.findings import Combination, Findings, Row
from kltest.identify.instances import instances
from kltest.loss.placement import ROW_FIELDS
from kltest.moments.differentiate import Experiment, differentiate, leaf_gradients
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
    if not row.wrong or not (row.identified is None or "entropy" in row.identified):
        return None
    return _tempered(findings)


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
        """Describe the temperature, and the named gradient behind it if there is one."""
        if self._residual(self._gradients({}))[0] < self.limit:
            return None
        for side, fields in self._sides():
            temperature = self._undone(fields)
            if temperature is None:
                continue
            if self.with_entropy and self._added(fields, temperature):
                return None
            _, behind = self._residual(self._gradients(dict.fromkeys(fields, temperature)))
            return (
                f"{side} log-probs are divided by a temperature of {temperature:.4g}; multiplied by it again, the "
                f"gradient is {render(behind)}"
            )
        return self._vanishing() if self.read & {"ref_logits", "ref_logp"} else None

    def _sides(self) -> list[tuple[str, tuple[str, ...]]]:
        """Sides that the loss reads, each by all of its fields and by its logits alone."""
        sides: dict[tuple[str, ...], str] = {}
        for side, fields in SIDES.items():
            read = tuple(field for field in fields if field in self.read)
            for chosen in (read, tuple(field for field in read if "logits" in field)):
                if chosen:
                    sides.setdefault(chosen, side)
        return [(side, fields) for fields, side in sides.items()]

    def _undone(self, fields: tuple[str, ...]) -> float | None:
        """Search for a temperature of one side at which the gradient is named once it is undone."""
        from scipy.optimize import minimize_scalar  # slow to import, and most losses never come here

        def left(log_temperature: float) -> float:
            return self._residual(self._gradients(dict.fromkeys(fields, float(np.exp(log_temperature)))))[0]

        for start in _valleys(left):
            step = GRID[1] - GRID[0]
            found = minimize_scalar(
                left, bounds=(start - step, start + step), method="bounded", options={"xatol": 1e-11}
            )
            if found.fun < self.limit and abs(found.x) > NONE and self._isolated(left, float(found.x)):
                return float(np.exp(found.x))
        return None

    def _isolated(self, left: Callable[[float], float], found: float) -> bool:
        """Return True if more is left a little away on both sides: beyond a kink any factor may fit."""
        return min(left(found - APART), left(found + APART)) > self.limit

    def _vanishing(self) -> str | None:
        """Describe the temperature other than 1 at which the policy, taken as the reference, leaves no gradient."""
        from scipy.optimize import brentq

        tables = [instance.policy[0] for instance in self.drawn]

        def with_reference(log_power: float) -> list[np.ndarray]:
            return self._gradients({}, reference=[float(np.exp(log_power)) * table for table in tables])

        def along(log_power: float) -> float:
            return float(with_reference(log_power)[0] @ (tables[0] - tables[0].mean()))

        scale = max(float(np.linalg.norm(with_reference(power))) for power in (GRID[0], GRID[-1]))

        def left(log_power: float) -> float:
            return float(np.linalg.norm(with_reference(log_power))) / scale if scale else 0.0

        seen = [along(power) for power in GRID]
        for low, high, one, other in zip(GRID[:-1], GRID[1:], seen[:-1], seen[1:], strict=True):
            if one * other > 0:
                continue
            power = float(brentq(along, low, high, xtol=1e-13)) if one and other else float(high if one else low)
            if abs(power) > NONE and left(power) < self.limit and self._isolated(left, power):
                return (
                    f"the gradient vanishes if the reference is the policy at a temperature of {np.exp(-power):.4g} "
                    "instead of the policy itself"
                )
        return None

    def _gradients(self, factors: dict[str, float], reference: list[np.ndarray] | None = None) -> list[np.ndarray]:
        """(V,) expected gradient of each instance, with fields multiplied by factors, or with another reference."""
        changed = {field: factor * self.base.peek(field).detach() for field, factor in factors.items()}
        if reference is not None:
            table = torch.from_numpy(np.stack(reference)).log_softmax(-1)
            rows = torch.arange(len(reference)).repeat_interleave(table.shape[1])
            changed["ref_logits"] = table[rows][:, None]
            changed["ref_logp"] = table[rows].gather(-1, self.base.peek("tokens"))
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
        return found

    def _residual(self, gradients: list[np.ndarray]) -> tuple[float, Combination]:
        """(relative residual, combination) of the best multiple of one named gradient, on all instances together."""
        found = np.concatenate(gradients)
        size = float(np.linalg.norm(found))
        if size == 0:
            return 1.0, {"zero": 1.0}
        candidates: list[tuple[float, Combination]] = [(1.0, {"zero": 1.0})]
        for name, column in _named(self.drawn).items():
            coefficient = float(found @ column / (column @ column))
            candidates.append((float(np.linalg.norm(found - coefficient * column)) / size, {name: coefficient}))
        return min(candidates, key=itemgetter(0))

    def _added(self, fields: tuple[str, ...], temperature: float) -> bool:
        """Return True if an entropy was added to a KL: log π/τ − log ref is log π − log ref with an entropy bonus.

        A tempered distribution is normalised again, so that a constant added to its log-probs does nothing. If there
        are no others to normalise with and the loss is differentiable in the reference's, f(log π/τ − log ref) has
        derivatives in the ratio −1/τ on every sample, and a sum of two terms has not. A cost that is linear in
        both may be either: an entropy if rewards are read, since it is a usual term beside them.
        """
        if "logits" in fields[0]:
            moved = self.base.replace(**{field: self.base.peek(field).detach() + 1.0 for field in fields})
            one, other = (float(self.loss(batch).objective.detach()) for batch in (self.base.replace(), moved))
            return abs(one - other) > self.limit * abs(one)
        if {"logp", "ref_logp"} - self.read or len(fields) != 1:
            return False
        rollout = self.base.replace()
        own = leaf_gradients(self.loss, self.loss(rollout).objective, rollout).get("logp")
        towards = received(Experiment(self.loss), self.base, ["ref_logp"]).get("ref_logp")
        if own is None or towards is None or not towards.any():
            return own is not None and towards is None and bool(self.read & ROW_FIELDS)
        ratio = 1 / temperature if fields == ("logp",) else temperature
        return bool((own + ratio * towards).abs().max() > self.limit * own.abs().max())


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
