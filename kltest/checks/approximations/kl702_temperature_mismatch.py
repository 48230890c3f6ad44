"""KL702: log-probs are taken at a temperature that the tokens were not drawn at.

A loss that divides the policy's log-probs (or logits) by τ is a known loss of the divided ones, so it follows a named
gradient when its input comes multiplied by τ. The policy's, the reference's, the sampler's side and several at once are
tried, each with a one-dimensional search over τ, in bandits, in which a wrong temperature always shows.
"""

from contextlib import suppress
from functools import partial
from operator import itemgetter

import numpy as np
import torch

from kltest.environments.policies import softmax_gradient
from kltest.errors import KltestError
from kltest.identify.findings import Combination, Findings, Row, has_entropy, proportion, shared
from kltest.moments.differentiate import differentiate
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout
from kltest.truth import counts_alone, gradient, render

# Logarithms of temperatures from 1/6 to 6; no minimum that matters is narrower than a step of the grid.
GRID = np.linspace(-1.8, 1.8, 49)
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
}


def explains(row: Row, findings: Findings) -> str | None:
    """Describe the temperature that explains a row that is unnamed, or named with an entropy in it."""
    unnamed = row.identified is None or has_entropy(row.identified)
    return _tempered(findings) if row.wrong and unnamed else None


@shared
def _tempered(findings: Findings) -> str | None:
    if findings.observed.coupled or findings.observed.blocked:
        return None
    with suppress(KltestError):  # a loss that cannot be called so proves nothing
        return _Bandits(findings).tempered()
    return None


class _Bandits:
    """The loss on all rollouts of all instances of a bandit, in one batch."""

    def __init__(self, findings: Findings) -> None:
        case = findings.measure.case("bandit", "current")
        self.loss, self.drawn = findings.loss, case.instances
        self.factor = float(sum(len(instance.paths) for instance in self.drawn))
        self.factor = 1.0 if findings.observed.reduction == "sum" else self.factor
        parts = [Rollout.of(instance, padding=findings.seed) for instance in self.drawn]
        fields = {name: torch.cat([part.peek(name).detach() for part in parts]) for name in parts[0]}
        fields["group"] = torch.arange(len(parts)).repeat_interleave(len(parts[0]))
        self.base = Rollout(fields)
        names = (*NAMES, *(name for name in case.further if not counts_alone(name)))
        self.named = {name: np.concatenate([gradient(name, one)[0] for one in self.drawn]) for name in names}
        single = findings.measure.alone("bandit", "current")
        self.named_as = (single.identified if single else None) or {}
        self.declared = single.expected if single else findings.expect
        self.limit = TOLERANCES[findings.observed.dtype].search

    def tempered(self) -> str | None:
        """Describe the temperature, and the named gradient behind it, of the first side that has one."""
        if self._left((), 0.0) < self.limit:
            return None
        rollout = self.base.replace()
        self.loss(rollout)
        sides: dict[tuple[str, ...], str] = {}
        for side, fields in SIDES.items():
            read = tuple(field for field in fields if field in rollout.accessed)
            sides.setdefault(read, side)
            sides.setdefault(tuple(field for field in read if "logits" in field), side)
        for fields, side in sides.items():
            log_temperature = self._undone(fields) if fields else None
            if log_temperature is None:
                continue
            _, behind = self._nearest(fields, log_temperature)
            if "entropy" not in self.named_as or (self._normalised(fields) and not self._is_a_bonus(behind)):
                return (
                    f"{side} log-probs are divided by a temperature of {np.exp(log_temperature):.4g}; multiplied by it "
                    f"again, the gradient is {render(behind)}"
                )
        return None

    def _undone(self, fields: tuple[str, ...]) -> float | None:
        """Search for the logarithm of a temperature at which the gradient is named once it is undone."""
        from scipy.optimize import minimize_scalar  # slow to import, and most losses never come here

        left, step = partial(self._left, fields), GRID[1] - GRID[0]
        start = min(GRID.tolist(), key=left)
        found = minimize_scalar(left, bounds=(start - step, start + step), method="bounded", options={"xatol": 1e-11})
        # Beyond a kink any factor may fit: a little away, more has to be left.
        isolated = min(left(found.x - APART), left(found.x + APART)) > self.limit
        return float(found.x) if found.fun < self.limit and abs(found.x) > NONE and isolated else None

    def _normalised(self, fields: tuple[str, ...]) -> bool:
        """Return True if a constant added to log-probs changes nothing: log π/τ − log ref would be an entropy bonus."""
        if "logits" not in fields[0]:
            return False
        moved = self.base.replace(**{field: self.base.peek(field).detach() + 1.0 for field in fields})
        one, other = (float(self.loss(batch).objective.detach()) for batch in (self.base.replace(), moved))
        return abs(one - other) <= self.limit * abs(one)

    def _is_a_bonus(self, behind: Combination) -> bool:
        """Return True if a·KL − b·entropy is meant, which is (a + b)·KL to the reference at the temperature 1 + b/a.

        The one whose KL has the declared coefficient is meant; if neither has it, what the entropy makes larger.
        """
        whole, alone = proportion(behind, self.declared), {**self.named_as}
        lower = alone.pop("entropy") < 0
        part = proportion(alone, self.declared)
        for factor, bonus in ((whole, False), (part, True)):
            if factor is not None and abs(factor - 1) < NONE:
                return bonus
        return lower

    def _left(self, fields: tuple[str, ...], log_temperature: float) -> float:
        return self._nearest(fields, log_temperature)[0]

    def _nearest(self, fields: tuple[str, ...], log_temperature: float) -> tuple[float, Combination]:
        """(relative residual, combination) of the best multiple of one named gradient, on all instances together.

        The fields are multiplied by the temperature before the loss is called.
        """
        temperature = float(np.exp(log_temperature))
        changed = {field: temperature * self.base.peek(field).detach() for field in fields}
        called = differentiate(self.loss, self.base.replace(**changed), None, self.factor)
        found = []
        for instance, rows in zip(self.drawn, np.split(np.arange(len(self.base)), len(self.drawn)), strict=True):
            weights, table = np.exp(instance.policy[0]), np.zeros(len(rows))
            if called.logp is not None:
                table += (temperature if "logp" in fields else 1.0) * weights * called.logp[rows, 0]
            if called.logits is not None:
                table += (temperature if "logits" in fields else 1.0) * weights @ called.logits[rows, 0]
            found.append(softmax_gradient(table[None], instance.policy)[0])
        whole = np.concatenate(found)
        size = float(np.linalg.norm(whole))
        candidates: list[tuple[float, Combination]] = [(1.0, {"zero": 1.0})]
        for name, column in self.named.items() if size else ():
            coefficient = float(whole @ column / (column @ column))
            candidates.append((float(np.linalg.norm(whole - coefficient * column)) / size, {name: coefficient}))
        return min(candidates, key=itemgetter(0))


def at_a_temperature(logits, ref_logits):
    logits, ref_logits = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    log_probs = (logits / 0.5).log_softmax(-1)
    return (log_probs.exp() * (log_probs - ref_logits)).sum(-1)
