"""Every estimator graded at all weights of a small transformer, as by `kltest grade --environment transformer`.

In a table every context has its own logits. A transformer's contexts share weights: the gradient at the weights is Jᵀ
times that at the logits, and named gradients could become linearly dependent. The expected gradient over all
completions is identified among the named gradients at the weights, and should be what the estimator's SPEC names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kltest.estimators import find, registry
from kltest.grading.grader import BOTH, plan
from kltest.grading.options import Options
from kltest.loss.resolve import resolve
from kltest.sweeps.progress import Progress

ENVIRONMENT = "transformer"
# Coefficients come from a fit whose residual is below 1e-9.
SAME = 1e-8


@dataclass(frozen=True)
class ExactRow:
    """Result of one estimator under one sampler.

    Attributes:
        identified: The named gradients that it follows at the weights; None if unnamed.
        expected: Those that its SPEC names for sequences.
        bias: Relative to ∇KL(π‖ref) at all weights, the worst instance.
        cosine: With ∇KL(π‖ref), the worst instance; None for a zero gradient.
        residual: Of the identification, or of the best fit.
    """

    estimator: str
    sampler: str
    identified: Mapping[str, float] | None
    expected: Mapping[str, float] | None
    bias: float
    cosine: float | None
    residual: float

    @property
    def agrees(self) -> bool:
        """True if it follows what its SPEC names."""
        found, named = self.identified or {}, self.expected or {}
        return found.keys() == named.keys() and all(abs(found[name] - named[name]) < SAME for name in named)


def rows(estimators: Sequence[str] = (), seed: int = 0) -> Iterator[ExactRow]:
    """Yield a row for each estimator and sampler; for all registered ones unless some are named.

    Raises:
        UsageError: There is no estimator of that name, or transformers is not installed.
    """
    chosen = [find(name).spec for name in estimators] or [entry.spec for entry in registry().values()]
    options = Options.of(environment=ENVIRONMENT, sampler="both", seed=seed)
    with Progress("exact", len(chosen)) as progress:
        for spec in chosen:
            measure = plan(resolve(spec.name), options).measure
            for sampler in BOTH:
                # Of a loss that couples rollouts the last row is that of whole batches.
                row, expected = measure.rows(ENVIRONMENT, sampler)[-1], spec.expectation("sequence", sampler)
                found = row.identified, expected and dict(expected)
                yield ExactRow(spec.name, sampler, *found, row.relative_bias, row.cosine, row.residual)
            progress.advance(spec.name)
