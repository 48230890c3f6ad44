"""Demonstrations on one rollout, given by its log-probs: the values that losses return for it, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kltest.counterexample.demonstration import Demonstration
from kltest.loss.calling import bind
from kltest.moments.differentiate import CallResult, Experiment
from kltest.rollout import Rollout

Losses = dict[str, Callable[..., Any]]
Reading = Callable[[CallResult], float | Tensor]


def rollout(logp: Sequence[float], ref_logp: Sequence[float], mask: Sequence[float] | None = None) -> Rollout:
    """One rollout by its tokens' log-probs; the sampler is the policy."""
    fields = {"logp": one_row(logp), "ref_logp": one_row(ref_logp), "old_logp": one_row(logp)}
    fields["mask"] = torch.ones_like(fields["logp"]) if mask is None else one_row(mask)
    return Rollout(fields)


def one_row(numbers: Sequence[float]) -> Tensor:
    """(1, T) float64."""
    return torch.tensor([list(numbers)], dtype=torch.float64)


def of_calls(setting: str, losses: Losses, rows: Mapping[str, tuple[Rollout, Reading]]) -> Demonstration:
    """One row of numbers for each rollout and reading, one column for each loss."""
    ready = [Experiment(bind(function, name=name)) for name, function in losses.items()]
    cells: list[tuple[str | float, ...]] = []
    for question, (batch, read) in rows.items():
        cells.append((question, *(float(read(experiment.call(batch.replace()))) for experiment in ready)))
    return Demonstration(setting, ("", *losses), tuple(cells))


def value(result: CallResult) -> float | Tensor:
    """Read the value."""
    return result.outcome.objective.detach()


def gradient(token: int) -> Reading:
    """Read the gradient at a token's log-prob."""
    return lambda result: result.gradients["logp"][0, token] if "logp" in result.gradients else 0.0
