"""What one call of a loss gives, whatever the loss returned: the wall between targets and moments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from kltest.rollout import Rollout


@dataclass(frozen=True)
class Outcome:
    """A loss on one batch.

    `objective` is the scalar to be differentiated (the KL part, where the loss takes a coefficient); `rows` (B,) are
    its parts, with objective = rows.mean(), where the loss returned one number a sequence or a token, else None.
    `value` is what it returned, detached, where that was (B,) or (B, T); `metric` the logged `metrics["kl"]`, detached.
    """

    objective: Tensor
    returned: Literal["scalar", "rows", "tokens"]
    rows: Tensor | None = None
    value: Tensor | None = None
    metric: Tensor | None = None
    dtype: str = "float64"


class Loss(Protocol):
    """A loss made ready: call it with a rollout. `takes` names the rollout fields that it is given."""

    name: str
    takes: frozenset[str]

    def __call__(self, rollout: Rollout) -> Outcome: ...


@dataclass(frozen=True)
class Call:
    """How a target is to be called: the options of `kltest grade` that shape a call."""

    placement: Literal["loss", "reward", "both"] = "loss"
    credit: Literal["return", "to-go", "immediate"] = "return"
    beta: float = 1.0
    arguments: dict[str, object] = field(default_factory=dict)
