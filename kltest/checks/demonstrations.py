"""Pitfalls shown on one rollout, given by its log-probs: what losses return for it, and which gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kltest.checks.call_once import Seen, look
from kltest.counterexample.demonstration import Demonstration
from kltest.loss.calling import bind
from kltest.rollout import Rollout

Losses = dict[str, Callable[..., Any]]
Reading = Callable[[Seen], float | Tensor]


def rollout(logp: Sequence[float], ref_logp: Sequence[float], mask: Sequence[float] | None = None) -> Rollout:
    """One rollout by its tokens' log-probs; the sampler is the policy."""
    fields = {"logp": row(logp), "ref_logp": row(ref_logp), "old_logp": row(logp)}
    fields["mask"] = torch.ones_like(fields["logp"]) if mask is None else row(mask)
    return Rollout(fields)


def row(numbers: Sequence[float]) -> Tensor:
    return torch.tensor([list(numbers)], dtype=torch.float64)


def of_calls(setting: str, losses: Losses, rows: Mapping[str, tuple[Rollout, Reading]]) -> Demonstration:
    """A row of numbers a question: a rollout, and what to read from a call with it."""
    ready = [bind(function, name=name).for_experiments() for name, function in losses.items()]
    cells: list[tuple[str | float, ...]] = []
    for question, (batch, read) in rows.items():
        cells.append((question, *(float(read(look(loss, batch.replace()))) for loss in ready)))
    return Demonstration(setting, ("", *losses), tuple(cells))


def value(seen: Seen) -> float | Tensor:
    return seen.outcome.objective.detach()


def gradient(token: int) -> Reading:
    """Reads the gradient at a token's log-prob."""
    return lambda seen: seen.gradients["logp"][0, token] if "logp" in seen.gradients else 0.0
