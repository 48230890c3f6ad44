"""What grading has measured, before it is judged: rows, and the questions that checks ask about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import isclose
from typing import TYPE_CHECKING, Any, TypeVar

from kltest.errors import KltestError
from kltest.report import GradientRow, ValueRow

if TYPE_CHECKING:
    from kltest.identify.evaluate import Evaluator
    from kltest.identify.probes import Probes
    from kltest.identify.values import Reported
    from kltest.loss.outcome import Loss

T = TypeVar("T")
Combination = dict[str, float]


@dataclass(frozen=True)
class Row(GradientRow):
    """A row of the report while it is judged.

    `identified` and `expected` are spelt with the names that are independent in that world (on a bandit the local forms
    are the sequence-level ones). `length` is the common length of all rollouts, None where it varies. `variances` are
    those of the gradient of a batch, an instance each.
    """

    length: int | None = None
    value: ValueRow | None = None
    reported: Reported | None = None
    variances: tuple[float, ...] = ()

    @property
    def published(self) -> GradientRow:
        """The row without what only judging needs."""
        return GradientRow(**{entry.name: getattr(self, entry.name) for entry in fields(GradientRow)})

    @property
    def where(self) -> str:
        """The row's name in messages."""
        batches = f", batches of {self.batch}" if self.batch > 1 else ""
        return f"{self.environment} ({self.sampler}{batches})"

    @property
    def wrong(self) -> bool:
        return self.agrees is False


@dataclass
class Findings:
    """All rows of one target, and the means to learn more of it."""

    expect: Combination
    placement: str
    environments: tuple[str, ...]
    samplers: tuple[str, ...]
    evaluator: Evaluator
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _answers: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def loss(self) -> Loss:
        return self.evaluator.loss

    @property
    def seed(self) -> int:
        return self.evaluator.seed

    def once(self, experiment: Callable[[Findings], T]) -> T:
        """What an experiment that several checks look at found; made once, its KltestError raised again."""
        if experiment not in self._answers:
            try:
                self._answers[experiment] = experiment(self)
            except KltestError as error:
                self._answers[experiment] = error
        answer = self._answers[experiment]
        if isinstance(answer, KltestError):
            raise answer
        return answer

    @property
    def blocked(self) -> bool:
        """Whether no gradient reached the policy in any world."""
        return self.evaluator.blocked

    @property
    def coupled(self) -> bool:
        return self.evaluator.reduction == "coupled"

    @property
    def coupled_by_length(self) -> bool:
        """Whether rows are coupled where lengths differ and nowhere else."""
        lengths = {row.environment: row.length for row in self.evaluator.measured}
        return self.coupled and all(lengths[world] is None for world in self.evaluator.coupled_in)

    @property
    def probes(self) -> Probes:
        return self.evaluator.probes

    def alone(self, environment: str, sampler: str, batch: int = 1) -> Row | None:
        """The row of batches of one, or of so many, in a world, measured now if need be; None where it cannot be."""
        try:
            rows = self.evaluator.rows(environment, sampler)
        except KltestError:
            return None
        return next((row for row in rows if row.batch == batch), None)

    def why_not_stale(self) -> str | None:
        """The reason to skip what only shows with a stale sampler, where that was not graded."""
        if "stale" in self.samplers:
            return None
        return "graded with the sampler equal to the policy only; ask for --sampler both"

    def right_when_current(self, row: Row) -> bool:
        """Whether the same world agrees when the sampler is the policy."""
        current = self.alone(row.environment, "current")
        return current is not None and current.agrees is True


def proportion(identified: Combination | None, expected: Combination) -> float | None:
    """The c with identified = c·expected, or None where there is none."""
    if identified is None or set(identified) != set(expected) or "zero" in identified:
        return None
    ratios = [identified[name] / expected[name] for name in expected]
    return ratios[0] if all(isclose(ratio, ratios[0], rel_tol=1e-3) for ratio in ratios) else None


def local_form(combination: Combination) -> Combination:
    """The same combination with every term's prefixes held fixed."""
    local: Combination = {}
    for name, coefficient in combination.items():
        form = LOCAL_FORMS.get(name, name)
        local[form] = local.get(form, 0.0) + coefficient
    return local


def without_sampler(combination: Combination | None) -> Combination | None:
    """The same combination with prefixes weighted by the policy instead of the sampler."""
    if combination is None:
        return None
    plain: Combination = {}
    for name, coefficient in combination.items():
        base = name.removesuffix("@sampler")
        plain[base] = plain.get(base, 0.0) + coefficient
    return plain


LOCAL_FORMS = {
    "reverse_kl": "local_reverse_kl",
    "forward_kl": "local_forward_kl",
    "squared_log_ratio": "local_squared_log_ratio",
    "squared_log_ratio_sum": "local_squared_log_ratio",
    "chi_square": "local_chi_square",
    "total_variation": "local_total_variation",
}
