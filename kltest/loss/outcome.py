"""Losses, and the outcome of calling one: all that higher layers know of either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor, dtype

from kltest.estimators.spec import Credit, Placement, Spec
from kltest.rollout import Rollout

if TYPE_CHECKING:
    from kltest.loss.results import Result

Returned = Literal["scalar", "rows", "tokens"]


@dataclass(frozen=True)
class Outcome:
    """A loss on one batch.

    `objective` is the scalar to be differentiated (the KL part, if the loss takes a coefficient); `rows` (B,) are
    its parts, with objective = rows.mean(), if the loss returned one number a sequence or a token, else None.
    `value` is what it returned, detached, if that was (B,) or (B, T); `metric` the logged `metrics["kl"]`, detached:
    a scalar, (B,) or (B, T). All are float64; `dtype` is the lowest floating-point precision on the way.

    No gradient at all is not an error here: the objective then does not require grad, or its gradient with respect to
    the leaves (`rollout.built("logp")`, `rollout.built("logits")`) is None, since nothing connects the two.
    """

    objective: Tensor
    returned: Returned
    rows: Tensor | None = None
    value: Tensor | None = None
    metric: Tensor | None = None
    dtype: str = "float64"


class Loss(Protocol):
    """A loss made ready: call it with a rollout.

    `takes` names the rollout fields that it is given, `fields` says which parameter each one fills ("rollout" means
    that it may read any; `rollout.accessed` then tells). `settings` are the arguments that are not fields. `notes` are
    sentences for the report, complete after the first call. `writes` says what became of the fields that it wrote
    into; `made_trainable` the constants whose gradient it switched on.
    `takes_beta`: it is called at β and at 0, and its objective is the difference over β. `costly`: it says of itself
    that a call takes milliseconds. `spec` describes a registered estimator.
    """

    name: str
    takes: frozenset[str]
    fields: dict[str, str]
    placement: Placement
    credit: Credit
    settings: dict[str, object]
    takes_beta: bool
    costly: bool
    notes: list[str]
    writes: dict[str, str]
    made_trainable: set[str]
    spec: Spec | None

    def __call__(self, rollout: Rollout) -> Outcome: ...

    def for_experiments(self, floats: dtype | None = None) -> Loss: ...

    def at(self, beta: float) -> Loss: ...

    def beta(self, rollout: Rollout) -> float: ...

    def returned(self, rollout: Rollout, beta: float | None = None) -> Result: ...


@dataclass(frozen=True)
class Call:
    """Options of `kltest grade` that shape a call of the loss.

    `placement` and `credit` default to what a registered estimator says of itself, else to loss and return; `beta`
    to the rollout's own, which is 1. `arguments` fills parameters by name: any value, or "@field" for a field of the
    rollout; a dotted name (`self.beta`, `config.clip`) gives an attribute of a stand-in object.
    """

    placement: Placement | None = None
    credit: Credit | None = None
    beta: float | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
