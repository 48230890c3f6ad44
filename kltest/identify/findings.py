"""Data for checks: the rows of one loss, and a service that measures one more case if a check needs it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.combinations import Combination, has_entropy, local_form, proportion, when_current
from kltest.identify.rows import Observed, Row, multiple
from kltest.report import Reach, Status

if TYPE_CHECKING:
    from kltest.identify.measure import Measure
    from kltest.loss.calling import Loss

__all__ = [
    "Combination",
    "Findings",
    "Observed",
    "Row",
    "has_entropy",
    "local_form",
    "multiple",
    "proportion",
    "when_current",
]
T = TypeVar("T")

# Log-ratio from which on a token counts as one whose probability was tried.
APART = 0.01


@dataclass
class Findings:
    """Data for checks: the rows of one target, and `measure`, which measures one more case if a check needs it.

    `others` are rows of the loss without the fields that it can do without, and `beyond` what checks found further out
    there: a status and sentences by their codes. `scale` is the constant c if the rows agree up to scale; `expect` is
    then c times what was declared. `scales_all`: the policy term of a loss with a coefficient has the same constant.
    """

    expect: Combination
    placement: str
    environments: tuple[str, ...]
    samplers: tuple[str, ...]
    measure: "Measure"
    rows: list[Row] = field(default_factory=list)
    others: list[Row] = field(default_factory=list)
    beyond: dict[str, tuple[Status, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scale: float | None = None
    scales_all: bool = False
    reach: Reach = field(default_factory=Reach)
    _results: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def agree(self) -> bool:
        """True if every row follows what was declared, and there is one."""
        return bool(self.rows) and all(row.agrees is True for row in self.rows)

    def see(self, instance: Instance, sampler: str = "current", rows: int = 1) -> None:
        """Note an instance, the sampler that its rollouts came from, and the rows of its batches."""
        reach = self.reach
        reach.tokens = max(reach.tokens, instance.environment.horizon)
        reach.rows = max(reach.rows, rows)
        apart = np.abs(instance.policy - instance.reference)
        reach.reference = max(reach.reference, float(apart.max()))
        likely = np.exp(instance.policy[apart > APART])
        reach.probability = max(reach.probability, float(likely.max(initial=0.0)))
        reach.vocabulary = max(reach.vocabulary, instance.environment.vocabulary)
        drawn = np.abs(instance.policy - instance.behaviour(sampler))
        reach.sampler = max(reach.sampler, float(drawn[np.isfinite(drawn)].max(initial=0.0)))

    @property
    def observed(self) -> Observed:
        """Properties of the loss that its calls have shown."""
        return self.measure.observed

    @property
    def loss(self) -> "Loss":
        """The loss that is graded."""
        return self.measure.loss

    @property
    def seed(self) -> int:
        """The seed of instances and padding."""
        return self.measure.seed

    def once(self, experiment: "Callable[..., T]", *given: Any) -> T:
        """Return the result of an experiment that checks share; it is run once, and its KltestError raised again."""
        if (experiment, *given) not in self._results:
            try:
                self._results[experiment, *given] = experiment(self, *given)
            except KltestError as error:
                self._results[experiment, *given] = error
        result = self._results[experiment, *given]
        if isinstance(result, KltestError):
            raise result
        return result

    @property
    def noisy(self) -> bool:
        """True if the loss draws random numbers that change its gradient, in graded batches or in others."""
        return self.observed.draws and bool(self.observed.nondeterministic)

    def on_average(self) -> "Findings":
        """Return findings for experiments with a loss that draws random numbers: each call is a mean over many draws.

        TargetError if that cannot be had (kltest.moments.averaged).
        """
        return self.once(_on_average)

    def why_not_stale(self) -> str | None:
        """Return the reason to skip what shows with a stale sampler only, if that was not graded."""
        if any(sampler != "current" for sampler in self.samplers):
            return None
        return "graded with the sampler equal to the policy only; ask for --sampler both"


def _on_average(findings: Findings) -> Findings:
    measure = findings.measure.averaged()
    findings.notes.append(
        "Beyond the graded environments, and wherever batches are compared, its gradient was a mean over many draws of "
        "its random numbers: a difference below 10 % is not seen there."
    )
    # Without noise one rollout is a batch again, unless rows are coupled.
    rows = [row if measure.sizes.grouped or measure.sizes.requested else replace(row, batch=1) for row in findings.rows]
    return replace(findings, measure=measure, rows=rows, _results={})


def shared(experiment: Callable[..., T]) -> Callable[..., T]:
    """Decorate an experiment that several checks need: it is made once for each loss and the arguments after it."""
    return update_wrapper(lambda findings, *given: findings.once(experiment, *given), experiment)
