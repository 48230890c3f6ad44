"""The declared gradient in one world: how it is spelt there, and how far a measured one is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kltest.environments import Instance
from kltest.identify import transformers as networks
from kltest.identify.findings import Combination
from kltest.identify.identification import HELD_OUT, Identification, identify
from kltest.identify.instances import NETWORKS, instances, seeds
from kltest.truth import ATLAS, combine, gradient

# A target that is smaller than this share of its terms is zero up to rounding.
CANCELS = 1e-12


@dataclass(frozen=True)
class World:
    """A world under one sampler, as drawn from a seed; `group` where it is one for groups of that size."""

    environment: str
    sampler: str
    seed: int = 0
    group: int | None = None

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The instances that are fitted on, and the held-out one."""
        return instances(self.environment, self.seed, self.group)

    @property
    def candidates(self) -> dict[str, list[np.ndarray]]:
        """The named gradients on every instance; those of the sampler only where it is another policy."""
        return _candidates(self)

    @property
    def candidates_at_parameters(self) -> dict[str, list[np.ndarray]]:
        """The same at the policy's own parameters."""
        return _candidates_at_parameters(self)

    def at_parameters(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gradients (C, V) at the logits, one an instance, at the policy's own parameters: those logits, or weights.

        Those at a network's weights are given by coordinates that keep all inner products with named gradients.
        """
        if self.environment not in NETWORKS:
            return list(gradients)
        drawn = zip(self.instances, seeds(self.environment, self.seed), gradients, strict=True)
        return [networks.pulled(instance, seed).of(one) for instance, (_, seed), one in drawn]

    @property
    def freedom(self) -> int:
        """How many numbers are free: logits but for a constant in each context, or weights if they are fewer."""
        fitted = self.instances[:-HELD_OUT]
        free = [i.environment.n_contexts * (i.environment.vocabulary - 1) for i in fitted]
        if self.environment in NETWORKS:
            free = [min(n, networks.parameters(i.environment.vocabulary)) for n, i in zip(free, fitted, strict=True)]
        return sum(free)

    @property
    def length(self) -> int | None:
        """The one length of all rollouts, None where it varies."""
        lengths = self.instances[0].paths.lengths
        return int(lengths[0]) if (lengths == lengths[0]).all() else None

    def spelt(self, declared: Combination) -> Combination:
        """A combination in the names that are independent in this world: on a bandit there is nothing local."""
        candidates = _candidates(World(self.environment, "stale", self.seed, self.group))
        spelt: Combination = {}
        for name, coefficient in declared.items():
            own = identify([gradient(name, i) for i in self.instances], candidates).combination or {name: 1.0}
            for term, factor in own.items():
                spelt[term] = spelt.get(term, 0.0) + coefficient * factor
        kept = {name: coefficient for name, coefficient in spelt.items() if name != "zero" and abs(coefficient) > 1e-9}
        return kept or {"zero": 1.0}


@lru_cache(maxsize=64)
def _candidates(world: World) -> dict[str, list[np.ndarray]]:
    names = [name for name, row in ATLAS.items() if name != "zero" and (world.sampler == "stale" or not row.stale)]
    return {name: [gradient(name, instance) for instance in world.instances] for name in names}


@lru_cache(maxsize=64)
def _candidates_at_parameters(world: World) -> dict[str, list[np.ndarray]]:
    return {name: world.at_parameters(given) for name, given in _candidates(world).items()}


def size(instance: Instance) -> float:
    """‖∇KL(π‖ref)‖, the unit of all relative numbers."""
    return float(np.linalg.norm(gradient("reverse_kl", instance)))


def target(declared: Combination, instance: Instance) -> np.ndarray:
    """The declared gradient; exactly zero where its terms cancel up to rounding."""
    combined = combine(declared, instance)
    terms = sum(abs(c) * float(np.linalg.norm(gradient(name, instance))) for name, c in declared.items())
    return np.zeros_like(combined) if np.linalg.norm(combined) <= CANCELS * terms else combined


def relative_bias(found: np.ndarray, wanted: np.ndarray, unit: float) -> float:
    """‖found − wanted‖ / ‖wanted‖, over the unit ‖∇KL(π‖ref)‖ where nothing is wanted."""
    norm = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / (norm if norm > 0 else unit)


def worst_cosine(
    gradients: list[np.ndarray], targets: list[np.ndarray], identification: Identification
) -> float | None:
    """The least cosine of a gradient with its target; None where one of them is zero."""
    if identification.combination == {"zero": 1.0}:
        return None
    norms = [float(np.linalg.norm(g) * np.linalg.norm(t)) for g, t in zip(gradients, targets, strict=True)]
    if not all(norms):
        return None
    return min(float((g * t).sum()) / norm for g, t, norm in zip(gradients, targets, norms, strict=True))
