"""Every estimator's exact gradient at all weights of a transformer, beside that of the tabular case.

In a table every context has its own logits. A transformer's contexts share weights: the gradient at the weights is Jᵀ
times that at the logits, and named gradients could become linearly dependent. Each estimator is graded as by
`kltest grade --environment transformer`, with a model and an environment of the requested size: its expected gradient
over all completions is identified among the named gradients at the weights. The result should be that of the tabular
case.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kltest.environments import Environment, Instance, ragged, sequence
from kltest.errors import UsageError
from kltest.estimators import Estimator, find, registry
from kltest.finetune.processes import Processes
from kltest.identify.case import Case, relative_bias, worst_cosine
from kltest.identify.findings import Combination
from kltest.identify.findings import Row as GradedRow
from kltest.identify.identification import Identification, independent
from kltest.identify.instances import HELD_OUT, with_ties
from kltest.identify.measure import Measure
from kltest.identify.sizes import Sizes
from kltest.identify.uses import fields_used
from kltest.language_models.networks import Network, network
from kltest.loss.calling import Loss
from kltest.loss.resolve import resolve
from kltest.moments.tolerances import TOLERANCES
from kltest.sweeps.progress import Progress

BUILD: dict[str, Callable[..., Environment]] = {"sequence": sequence, "ragged": ragged}
SAMPLERS = ("current", "stale")
FITTED = 2
# (vocabulary, length) for losses that couple rows, whose batches or groups are enumerated: the sizes of the tabular
# environments for these.
FOR_BATCHES, FOR_GROUPS = (3, 3), (3, 2)
# The rollout length for which SPECs state coefficients.
LENGTH_OF_SPECS = 3
REVERSE_KL = {"reverse_kl": 1.0}


@dataclass(frozen=True)
class Request:
    """The model and the environment to enumerate: `vocabulary` tokens, rollouts of `length` or, if ragged, up to it."""

    model: str = "tiny"
    vocabulary: int = 8
    length: int = 3
    seed: int = 0
    device: str = "auto"
    estimators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """Result of one estimator in one environment under one sampler.

    Attributes:
        identified: The named gradients that it follows at the weights.
        expected: Those of the tabular case; None if it has no name there.
        agrees: True if both are the same.
        bias: Relative to ∇KL(π‖ref) at all weights, the worst instance.
        cosine: With ∇KL(π‖ref), the worst instance; None for a zero gradient.
        residual: Of the identification, or of the best fit.
        distance: Of the gradient from `expected`, relative; None if nothing is expected.
        completions: Number of rollouts that are enumerated.
        batch: Rollouts in a batch.
        names: Number of candidates.
        rank: Number of candidates that are linearly independent at the weights.
        rank_in_tables: The same at the logits.
        parameters: Number of weights.
    """

    estimator: str
    environment: str
    sampler: str
    identified: Combination | None
    expected: Combination | None
    agrees: bool
    bias: float
    cosine: float | None
    residual: float
    distance: float | None
    completions: int
    batch: int
    names: int
    rank: int
    rank_in_tables: int
    parameters: int


@dataclass(frozen=True)
class SizedCase(Case):
    """An environment of some (vocabulary, length); policies are networks, or tables of logits if there is none."""

    size: tuple[int, int] = (8, 3)
    network: Network | None = None

    @property
    def instances(self) -> tuple[Instance, ...]:
        return _instances(replace(self, sampler="current", group=None), ties=self.group is not None)

    @property
    def policy_seeds(self) -> list[tuple[int, ...]]:
        return [(self.seed, list(BUILD).index(self.environment), number) for number in range(FITTED + HELD_OUT)]


@lru_cache(maxsize=8)
def _instances(case: SizedCase, *, ties: bool) -> tuple[Instance, ...]:
    build, found = BUILD[case.environment], []
    for number, seed in enumerate(case.policy_seeds):
        contexts = build(*case.size).n_contexts
        reward = np.random.default_rng(seed).standard_normal((contexts, case.size[0]))
        environment = build(*case.size, reward=reward)
        if case.network is None:
            instance = Instance.draw(environment, np.random.SeedSequence([case.seed, number]))
        else:
            instance = case.network.instance(environment, seed)
        found.append(with_ties(instance, case.seed) if ties else instance)
    return tuple(found)


def rows(request: Request, *, shown: bool = False) -> Iterator[Row]:
    """Yield a row for each estimator, environment and sampler.

    Args:
        request: What to enumerate.
        shown: True to show a progress bar.

    Raises:
        UsageError: The environment cannot be enumerated, or the model cannot be loaded.
    """
    chosen = [find(name) for name in request.estimators] or list(registry().values())
    if request.vocabulary < 3 or request.length < 1:
        raise UsageError("an environment to enumerate has 3 tokens or more, and a length of 1 or more")
    target = network(request.model, request.vocabulary, request.seed, Processes.here(request.device).device)
    with Progress("exact", len(BUILD) * len(chosen)) if shown else nullcontext() as progress:
        for environment in BUILD:
            for estimator in chosen:
                name = estimator.spec.name
                loss = resolve(name)
                size = (request.vocabulary, request.length)
                if estimator.spec.couples:
                    size = FOR_GROUPS if Sizes.of(fields_used(loss, request.seed)).grouped else FOR_BATCHES
                for sampler in SAMPLERS:
                    case = SizedCase(environment, sampler, request.seed, size=size, network=target)
                    yield row_of(case, loss, estimator)
                if progress:
                    progress.advance(f"{name}, {environment}")


def row_of(case: SizedCase, loss: Loss, estimator: Estimator) -> Row:
    """Return the gradient that a loss follows in a case, beside that which the estimator follows in the tabular one."""
    expected = estimator.spec.expectation(case.environment, case.sampler)
    if case.size[1] != LENGTH_OF_SPECS and not estimator.spec.couples:
        expected = _measured(replace(case, network=None), loss, REVERSE_KL)[1].identified
    declared = dict(expected or REVERSE_KL)
    measure, found = _measured(case, loss, declared)
    distance = None if expected is None else found.relative_bias
    agrees = found.identified is None if distance is None else distance <= TOLERANCES[measure.observed.dtype].gradient
    place = measure.case(found)
    candidates = place.candidates_at_parameters
    bias, cosine = found.relative_bias, found.cosine
    if declared != REVERSE_KL:
        gradients, truth = place.at_parameters(measure.gradients(found)), candidates["reverse_kl"]
        bias = max(relative_bias(one, wanted, 1.0) for one, wanted in zip(gradients, truth, strict=True))
        cosine = worst_cosine(gradients, truth, Identification(found.identified, found.residual))
    joined = (
        {name: np.concatenate([one.ravel() for one in parts]) for name, parts in group.items()}
        for group in (candidates, place.candidates)
    )
    rank, rank_in_tables = (len(independent(columns)) for columns in joined)
    return Row(
        estimator.spec.name,
        case.environment,
        case.sampler,
        found.identified,
        None if expected is None else dict(expected),
        agrees,
        bias=bias,
        cosine=cosine,
        residual=found.residual,
        distance=distance,
        completions=len(place.instances[0].paths),
        batch=found.batch,
        names=len(candidates),
        rank=rank,
        rank_in_tables=rank_in_tables,
        parameters=case.network.parameters if case.network else 0,
    )


def _measured(case: Case, loss: Loss, declared: Combination) -> tuple[Measure, GradedRow]:
    """The loss graded in one case; the last row is that of the batches that it needs."""
    measure = Measure(loss, declared, fields_used(loss, case.seed), seed=case.seed)
    return measure, measure.rows_of(case)[-1]
