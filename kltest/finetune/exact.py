"""The atlas again for a network: every estimator's exact expected gradient at all weights of a transformer, named.

In a table every context has logits of its own. Here all contexts share weights: the gradient at the weights is Jᵀ times
that at the logits, named gradients could become dependent, and fewer weights than contexts would make them so. Each
estimator's gradient is summed over all completions with their probabilities, taken to the weights by one backward pass,
and identified there among the named gradients at the weights, with equal coefficients in several networks and confirmed
in one more. It is to be what it is in the tabular case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kltest.environments import Environment, Instance, ragged, sequence
from kltest.errors import UsageError
from kltest.estimators import Estimator, registry
from kltest.finetune.processes import Processes
from kltest.identify.identification import HELD_OUT, identify, independent, tolerance
from kltest.identify.instances import with_ties
from kltest.identify.measure import BATCHES, GROUP_FIELDS, GROUPS, MOST_BATCHES
from kltest.identify.uses import fields_used
from kltest.language_models.networks import Network, Pulled, network
from kltest.loss.outcome import Loss
from kltest.loss.resolve import resolve
from kltest.moments import Moments, exact, exact_batches
from kltest.sweeps.progress import Progress
from kltest.truth import ATLAS, gradient

FITTED = 2
SAMPLERS = ("current", "stale")
BUILD: dict[str, Callable[..., Environment]] = {"sequence": sequence, "ragged": ragged}
# Losses that couple rows are enumerated over batches and groups: the sizes of the tabular worlds for these.
SMALL, IN_GROUPS = (3, 3), (3, 2)
# As the atlas compares: coefficients are identified to a residual of 1e-9.
SAME = 1e-8
# So long are the rollouts that coefficients in SPECs are said for.
SPOKEN_OF = 3
Combination = Mapping[str, float]


@dataclass(frozen=True)
class Asked:
    """What is to be enumerated: `vocabulary` tokens, rollouts of `length`, or up to it where they are ragged."""

    model: str = "tiny"
    vocabulary: int = 8
    length: int = 3
    seed: int = 0
    device: str = "auto"
    estimators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One estimator in one world under one sampler.

    `bias` and `cosine` are against ∇KL(π‖ref) at all weights, the worst network; `residual` that of identification, or
    of the best fit; `distance` that of the gradient from `expected`, None where nothing is expected. `rank` of `names`
    says how many of the named gradients are independent at the weights, `rank_in_tables` how many are with a table of
    logits as the policy.
    """

    estimator: str
    world: str
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


def rows(asked: Asked, target: Network | None = None, *, shown: bool = False) -> Iterator[Row]:
    """A row an estimator, world and sampler. `target` is a network of one's own.

    Raises UsageError for what cannot be enumerated, or a model that cannot be had.
    """
    chosen = _estimators(asked.estimators)
    if asked.vocabulary < 3 or asked.length < 1:
        raise UsageError("a world to enumerate has 3 tokens or more, and a length of 1 or more")
    device = Processes.here(asked.device).device
    target = target or network(asked.model, asked.vocabulary, asked.seed, device)
    with Progress("exact", len(BUILD) * len(chosen)) if shown else nullcontext() as progress:
        for world in BUILD:
            places: dict[tuple[int, int, bool], Place] = {}
            for name, estimator in chosen.items():
                loss = resolve(name)
                size, grouped = (asked.vocabulary, asked.length), False
                if estimator.spec.couples:
                    grouped = bool(fields_used(loss, asked.seed) & GROUP_FIELDS)
                    size = IN_GROUPS if grouped else SMALL
                key = (*size, grouped)
                if key not in places:
                    places[key] = Place(target, world, *size, asked.seed, ties=grouped)
                for sampler in SAMPLERS:
                    yield places[key].row(name, loss, sampler, estimator, grouped)
                if progress:
                    progress.advance(f"{name}, {world}")


class Place:
    """One world with several networks in it, and the named gradients at their weights."""

    def __init__(self, target: Network, world: str, vocabulary: int, length: int, seed: int, *, ties: bool) -> None:
        salt = list(BUILD).index(world)
        seeds = [(seed, salt, number) for number in range(FITTED + HELD_OUT)]
        build, self.world, self.length, self.seed = BUILD[world], world, length, seed
        self.parameters = target.parameters
        contexts = build(vocabulary, length).n_contexts
        self.instances: list[Instance] = []
        self.named: list[dict[str, np.ndarray]] = []
        self.pulled: list[Pulled] = []
        for one in seeds:
            reward = np.random.default_rng(one).standard_normal((contexts, vocabulary))
            environment = build(vocabulary, length, reward=reward)
            instance = target.instance(environment, one)
            if ties:
                instance = with_ties(instance, seed)
            named = {name: gradient(name, instance) for name in ATLAS if name != "zero"}
            self.instances.append(instance)
            self.named.append(named)
            self.pulled.append(Pulled.at(target, instance.environment, target.drawn(one), named))
        # What the table has of directions, or the weights where they are fewer.
        self.freedom = FITTED * min(target.parameters, contexts * (vocabulary - 1))

    def candidates(self, sampler: str) -> dict[str, list[np.ndarray]]:
        """The named gradients at the weights, by network; those of the sampler only where it is another policy."""
        names = [name for name in self.pulled[0].names if sampler == "stale" or not ATLAS[name].stale]
        return {name: [pulled.names[name] for pulled in self.pulled] for name in names}

    def row(self, name: str, loss: Loss, sampler: str, estimator: Estimator, grouped: bool) -> Row:
        """What the estimator follows here, beside what it follows in the tabular case."""
        moments = [
            self._moments(loss, instance, sampler, estimator.spec.couples, grouped) for instance in self.instances
        ]
        candidates = self.candidates(sampler)
        found = [pulled.of(one.gradient) for pulled, one in zip(self.pulled, moments, strict=True)]
        magnitudes = [p.factor * float(np.sqrt(m.second_moment)) for p, m in zip(self.pulled, moments, strict=True)]
        truth = candidates["reverse_kl"]
        units = [float(np.linalg.norm(one)) for one in truth]
        dtype = "float64" if all(one.dtype == "float64" for one in moments) else "float32"
        identified = partial(identify, units=units, dtype=dtype, freedom=self.freedom)
        identification = identified(found, candidates, magnitudes=magnitudes)
        expected = estimator.spec.expectation(self.world, sampler)
        if self.length != SPOKEN_OF and not estimator.spec.couples:
            expected = self._in_tables(loss, sampler)
        wanted = None if expected is None else _combined(expected, candidates)
        distance = None
        if wanted is not None:
            pairs = zip(found, wanted, units, strict=True)
            distance = max(float(np.linalg.norm(f - w)) / (float(np.linalg.norm(w)) or unit) for f, w, unit in pairs)
        # Where named gradients depend on each other at the weights, one gradient has several spellings, of which
        # identification gives the first.
        spelt = None if wanted is None else identified(wanted, candidates).combination
        agrees = same(identification.combination, spelt) and (distance is None or distance <= tolerance(dtype))
        cosines = [float(f @ t) / unit / n for f, t, unit in zip(found, truth, units, strict=True) if (n := _norm(f))]
        zero = identification.combination == {"zero": 1.0}
        tables = {one: np.concatenate([named[one].ravel() for named in self.named]) for one in candidates}
        whole = {one: np.concatenate(columns) for one, columns in candidates.items()}
        return Row(
            name,
            self.world,
            sampler,
            identification.combination,
            None if expected is None else dict(expected),
            agrees,
            bias=max(_norm(f - t) / unit for f, t, unit in zip(found, truth, units, strict=True)),
            cosine=None if zero or not cosines else min(cosines),
            residual=identification.residual,
            distance=distance,
            completions=len(self.instances[0].paths),
            batch=moments[0].batch,
            names=len(candidates),
            rank=len(independent(whole)),
            rank_in_tables=len(independent(tables)),
            parameters=self.parameters,
        )

    def _moments(self, loss: Loss, instance: Instance, sampler: str, couples: bool, grouped: bool) -> Moments:
        if not couples:
            return exact(loss, instance, sampler, padding=self.seed)
        size = GROUPS[0] if grouped else BATCHES[0]
        found = exact_batches(loss, instance, sampler, size, grouped=grouped, padding=self.seed, most=MOST_BATCHES)
        scale = size if found.added_up else 1
        return replace(found, gradient=found.gradient / scale, second_moment=found.second_moment / scale**2)

    def _in_tables(self, loss: Loss, sampler: str) -> Combination | None:
        """What it is identified as with a table of logits as the policy, for lengths of which SPECs do not speak."""
        drawn = [
            Instance.draw(instance.environment, np.random.SeedSequence([self.seed, number]))
            for number, instance in enumerate(self.instances)
        ]
        names = self.candidates(sampler)
        found = [exact(loss, instance, sampler, padding=self.seed) for instance in drawn]
        return identify(
            [one.gradient for one in found],
            {name: [gradient(name, instance) for instance in drawn] for name in names},
            magnitudes=[float(np.sqrt(one.second_moment)) for one in found],
            units=[float(np.linalg.norm(gradient("reverse_kl", instance))) for instance in drawn],
        ).combination


def same(found: Combination | None, expected: Combination | None) -> bool:
    """The same names with the same coefficients, or both nothing that has a name."""
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(abs(found[name] - expected[name]) <= SAME for name in expected)


def _combined(combination: Combination, candidates: dict[str, list[np.ndarray]]) -> list[np.ndarray]:
    zero = [np.zeros_like(one) for one in candidates["reverse_kl"]]
    terms = [[c * one for one in candidates.get(name, zero)] for name, c in combination.items()]
    return [np.sum(parts, axis=0) for parts in zip(*terms, strict=True)]


def _norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))


def _estimators(names: Sequence[str]) -> dict[str, Estimator]:
    from kltest.estimators import find

    if not names:
        return registry()
    chosen = [find(name) for name in names]
    return {one.spec.name: one for one in chosen}
