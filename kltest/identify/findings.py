"""Results of measuring one loss: rows, and what was noticed on the way. Data, without the means to measure more."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import isclose
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.report import GradientRow, Reach, ValueRow
from kltest.truth import ATLAS

if TYPE_CHECKING:
    from kltest.identify.measure import Measure
    from kltest.identify.values import Reported
    from kltest.loss.calling import Loss
    from kltest.moments.moments import Reduction

T = TypeVar("T")
Combination = dict[str, float]


@dataclass(frozen=True)
class Row(GradientRow):
    """A row of the report, before the verdict.

    `identified` and `expected` use the names that are independent in that environment (on a bandit the local forms
    are the sequence-level ones). `length` is the common length of all rollouts in tokens, None if it varies.
    `variances` are the variances of the gradient of one batch, one an instance.
    """

    length: int | None = None
    value: ValueRow | None = None
    reported: "Reported | None" = None
    variances: tuple[float, ...] = ()

    @property
    def published(self) -> GradientRow:
        """The fields that a report shows."""
        return GradientRow(**{entry.name: getattr(self, entry.name) for entry in fields(GradientRow)})

    @property
    def where(self) -> str:
        """The row's name in messages."""
        batches = f", batches of {self.batch}" if self.batch > 1 else ""
        return f"{self.environment} ({self.sampler}{batches})"

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
    `coupled_in` names the environments in which the rows of a batch are coupled. `rows` are all rows by (environment,
    sampler), those that only a check asked for included.
    """

    uses: frozenset[str] = frozenset()
    dtype: str = "float64"
    reductions: list["Reduction"] = field(default_factory=list)
    reached: list[bool] = field(default_factory=list)
    nondeterministic: str = ""
    draws: bool = False
    keeps_state: bool = False
    unrepeatable: bool = False
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


# Log-ratio from which on a token counts as one whose probability was tried.
APART = 0.01


@dataclass
class Findings:
    """Data for checks: the rows of one target, and `measure`, which measures one more case if a check needs it.

    `scale` is the constant c if the rows agree up to scale; `expect` is then c times what was declared. `scales_all`:
    the policy term of a loss with a coefficient has the same constant.
    """

    expect: Combination
    placement: str
    environments: tuple[str, ...]
    samplers: tuple[str, ...]
    measure: "Measure"
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scale: float | None = None
    scales_all: bool = False
    reach: Reach = field(default_factory=Reach)
    _results: dict[Any, Any] = field(default_factory=dict, repr=False)

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
        reach.sampler = max(reach.sampler, float(np.abs(instance.policy - instance.behaviour(sampler)).max()))

    @property
    def observed(self) -> Observed:
        """What calls of the loss have shown of it."""
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

    def why_not_stale(self) -> str | None:
        """Return the reason to skip what shows with a stale sampler only, if that was not graded."""
        if "stale" in self.samplers:
            return None
        return "graded with the sampler equal to the policy only; ask for --sampler both"


def proportion(identified: Combination | None, expected: Combination) -> float | None:
    """Return the c with identified = c·expected, or None if there is none."""
    from kltest.moments.tolerances import Tolerances  # imports torch

    if not identified or set(identified) != set(expected) or "zero" in identified:
        return None
    ratios = [identified[name] / expected[name] for name in expected]
    return ratios[0] if all(isclose(ratio, ratios[0], rel_tol=Tolerances.factor) for ratio in ratios) else None


def multiple(row: Row) -> float | None:
    """The c of a row that follows c times the declared gradient, or c times its local form; None if there is none."""
    whole = proportion(row.identified, row.expected)
    return proportion(when_current(row.identified), local_form(row.expected)) if whole is None else whole


def local_form(combination: Combination) -> Combination:
    """Return the same combination with every term's prefixes held fixed."""
    return replaced(combination, lambda name: {LOCAL_FORMS.get(name, name): 1.0})


def when_current(combination: Combination | None) -> Combination:
    """Return what the combination is if the sampler is the policy, in names without one; {} for None."""
    return {} if combination is None else replaced(combination, lambda name: ATLAS[name].on_policy or {name: 1.0})


def replaced(combination: Combination, terms: Callable[[str], Mapping[str, float]]) -> Combination:
    """Replace each name by a combination; coefficients of terms that get the same name are added up."""
    found: Combination = {}
    for name, coefficient in combination.items():
        for term, factor in terms(name).items():
            found[term] = found.get(term, 0.0) + coefficient * factor
    kept = {name: coefficient for name, coefficient in found.items() if name != "zero" and abs(coefficient) > 1e-9}
    return kept or {"zero": 1.0}


LOCAL_FORMS = {
    "reverse_kl": "local_reverse_kl",
    "forward_kl": "local_forward_kl",
    "squared_log_ratio": "local_squared_log_ratio",
    "squared_log_ratio_sum": "local_squared_log_ratio",
    "chi_square": "local_chi_square",
    "total_variation": "local_total_variation",
}
