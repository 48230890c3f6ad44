"""One call of a loss and one backward pass, whatever comes of it: for experiments on unusual input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.outcome import Loss, Outcome
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

ROWS = 12


@dataclass(frozen=True)
class CallResult:
    """Outcome of a loss on one batch, and the gradient at every position of the leaves that it used.

    `live` (B, T) bool: the positions that hold tokens.
    """

    outcome: Outcome
    gradients: dict[str, Tensor]
    live: Tensor

    @property
    def value(self) -> Tensor:
        """The returned value: a scalar, (B,), or (B, T) with 0 at padded positions."""
        value = self.outcome.value
        if value is None:
            return self.outcome.objective.detach()
        return value.where(self.live, 0.0) if self.outcome.returned == "tokens" else value

    def at(self, positions: Tensor) -> dict[str, Tensor]:
        """Gradients at some positions (B, T) bool, by leaf."""
        return {name: gradient[positions] for name, gradient in self.gradients.items()}

    @property
    def row_sizes(self) -> Tensor:
        """(B,) largest absolute gradient at each row's live tokens, NaN if there is one."""
        sizes = [
            torch.where(self.live, gradient.reshape(*self.live.shape, -1).abs().amax(dim=2), 0.0).amax(dim=1)
            for gradient in self.gradients.values()
        ]
        return torch.stack(sizes).amax(dim=0) if sizes else torch.zeros(len(self.live), dtype=torch.float64)


def call_once(loss: Loss, rollout: Rollout) -> CallResult:
    """Call a loss and differentiate what it returned; TargetError if it raises."""
    live = rollout.peek("mask") != 0
    outcome = loss(rollout)
    return CallResult(outcome, leaf_gradients(loss, outcome.objective, rollout), live)


def usual_batch(findings: Findings, sampler: str = "stale") -> Rollout:
    """Rollouts of every length with different rewards; groups of two, three, four or six divide their number."""
    instance = instances("ragged", findings.seed)[0]
    lengths = instance.paths.mask.sum(axis=1)
    rows = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))[:ROWS]
    return Rollout.of(instance, sampler=sampler, padding=findings.seed, centre="batch").take(sorted(rows))
