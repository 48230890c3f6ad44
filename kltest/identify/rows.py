"""Rows of one loss and what was noticed while they were measured: data alone, without torch."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from kltest.identify.combinations import Combination, has_entropy, local_form, proportion, when_current
from kltest.report import GradientRow, ValueRow

if TYPE_CHECKING:
    from kltest.identify.case import Case
    from kltest.moments.moments import Reduction

# A metric below this share of the KL is a rounded zero, which is a multiple of anything.
NOTHING = 1e-9


@dataclass(frozen=True)
class Reported:
    """Reported value of a loss in one case: exact means, an instance each, and the true numbers beside them.

    `is_metric`: it is a logged KL, not what the loss returned. `judged`: it can be told whether it is a KL.
    """

    row: ValueRow
    is_metric: bool
    means: tuple[float, ...]
    truths: tuple[dict[str, float], ...]
    judged: bool = True

    @property
    def factors(self) -> dict[str, float]:
        """Names of which the value is the same multiple on every instance, with that multiple; none for zero."""
        from kltest.moments.tolerances import TOLERANCES  # imports torch

        found, tolerance = {}, TOLERANCES["float64"].value
        for name in self.truths[0]:
            ratios = [mean / truth[name] for mean, truth in zip(self.means, self.truths, strict=True)]
            if abs(ratios[0]) > NOTHING and np.ptp(ratios) <= tolerance * abs(ratios[0]):
                found[name] = float(ratios[0])
        return found


@dataclass(frozen=True, kw_only=True)
class Row(GradientRow):
    """A row of the report, before the verdict.

    `identified` and `expected` use the names that are independent in that environment (on a bandit the local forms
    are the sequence-level ones). `gradients` (C, V) are the expected ones and `variances` those of the gradient of one
    batch, one an instance; both are empty for a row that was sampled. `branch` names other arguments, in words.
    """

    case: "Case"
    branch: str = ""
    gradients: tuple[np.ndarray, ...] = field(default=(), compare=False, repr=False)
    variances: tuple[float, ...] = ()
    reported: Reported | None = None

    @property
    def length(self) -> int | None:
        """The common length of all rollouts in tokens, None if it varies."""
        return self.case.length

    @property
    def value(self) -> ValueRow | None:
        """The logged value's row of the report."""
        return self.reported.row if self.reported else None

    @property
    def published(self) -> GradientRow:
        """The fields that a report shows."""
        return GradientRow(**{entry.name: getattr(self, entry.name) for entry in fields(GradientRow)})

    @property
    def where(self) -> str:
        """The row's name in messages."""
        batches = f", batches of {self.batch}" if self.batch > 1 else ""
        branch = f", {self.branch}" if self.branch else ""
        return f"{self.environment} ({self.sampler}{batches}{branch})"

    @property
    def entropy(self) -> float:
        """The coefficient of an entropy that was not declared, beside another term; 0 if there is none."""
        terms = self.identified or {}
        if has_entropy(self.expected) or all(has_entropy({name: 1.0}) for name in terms):
            return 0.0
        return sum(factor for name, factor in terms.items() if has_entropy({name: 1.0}))

    @property
    def besides_entropy(self) -> Combination | None:
        """The identified combination, without an entropy that was not declared, if it stands beside another term."""
        if not self.entropy:
            return self.identified
        return {name: factor for name, factor in (self.identified or {}).items() if not has_entropy({name: 1.0})}

    @property
    def wrong(self) -> bool:
        """True if the row disagrees with what was declared, whether that was expected or not."""
        return self.agrees is False


@dataclass
class Observed:
    """Properties of a loss that showed while its gradients were measured.

    `uses` are the rollout fields that the loss takes or reads. `reductions` and `reached` have one entry for each set
    of moments, in the order of measuring. `nondeterministic` is the message of a loss that gave two gradients for one
    batch, else empty. It `draws` random numbers, or `keeps_state` that changes no expected gradient; both are restored
    before each call of an experiment. It is `unrepeatable` if that does not help, or if the state changes the gradient.
    It may draw only farther out than rows were measured: `draws_far`; `averaged_far`: these numbers are why a gradient
    differed there. `value_moves`: what it returns for one batch differs from call to call, and its gradient does not.
    `coupled_in` names the environments in which the rows of a batch are coupled. `rows` are all rows by (environment,
    sampler), those that only a check asked for included.
    """

    uses: frozenset[str] = frozenset()
    dtype: str = "float64"
    reductions: list["Reduction"] = field(default_factory=list)
    reached: list[bool] = field(default_factory=list)
    nondeterministic: str = ""
    draws: bool = False
    draws_far: bool = False
    averaged_far: bool = False
    keeps_state: bool = False
    unrepeatable: bool = False
    value_moves: bool = False
    coupled_in: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict)

    @property
    def reduction(self) -> "Reduction":
        """The reduction that fits all environments.

        One coupled environment decides: at a fixed length the mean over a batch's tokens looks like a mean over rows.
        """
        return "coupled" if "coupled" in self.reductions else (self.reductions or ["mean"])[-1]

    @property
    def blocked(self) -> bool:
        """True if no gradient reached the policy in any environment."""
        return bool(self.reached) and not any(self.reached)

    @property
    def coupled(self) -> bool:
        """True if the loss couples rows in some environment."""
        return self.reduction == "coupled"

    @property
    def coupled_by_length(self) -> bool:
        """True if rows are coupled in environments where lengths differ, and in no other."""
        lengths = {row.environment: row.length for rows in self.rows.values() for row in rows}
        return self.coupled and all(lengths[name] is None for name in self.coupled_in)


def multiple(row: Row) -> float | None:
    """The c of a row that follows c times the declared gradient, or c times its local form; None if there is none."""
    whole = proportion(row.identified, row.expected)
    return proportion(when_current(row.identified), local_form(row.expected)) if whole is None else whole
