"""Case: an environment under one sampler, with its instances, its named gradients and the declared one."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kltest.environments import Instance
from kltest.environments.samplers import drawn_by, kept_mass
from kltest.errors import InvalidEnvironmentError
from kltest.identify.combinations import Combination, replaced, when_current
from kltest.identify.identification import Identification, identify, independent
from kltest.identify.instances import HELD_OUT, NETWORKS, instances, network, parameter_gradient, seeds
from kltest.truth import ATLAS, counts_alone, gradient, on_rollouts_of_the_sampler

if TYPE_CHECKING:
    from kltest.language_models.networks import Network

# Between the seeds of instances that only tell which names are independent: far from those that anybody asks for.
FURTHER = 1_000_003
# A target that is smaller than this share of its terms is zero up to rounding.
CANCELS = 1e-12


@dataclass(frozen=True)
class Case:
    """An environment under one sampler, drawn from a seed; `group` is the group size of an environment for groups.

    `least` is the least number of tokens to choose from, and `further` are names of next-token distributions, of
    the lengths of a batch, or of a policy part, which are candidates only for a loss that reads, or is, one.
    """

    environment: str
    sampler: str
    seed: int = 0
    group: int | None = None
    least: int = 0
    further: tuple[str, ...] = ()

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The instances to fit on, then the held-out one."""
        return self._drawn(self.seed)

    @property
    def on_policy(self) -> bool:
        """True if the policy draws the rollouts."""
        return self.sampler == "current"

    @property
    def _added(self) -> tuple[str, ...]:
        """The further names, and those that they have on rollouts of the sampler."""
        others = (on_rollouts_of_the_sampler(name) for name in self.further if not ATLAS[name].stale)
        return tuple(dict.fromkeys((*self.further, *others)))

    @lru_cache(maxsize=128)  # noqa: B019
    def _drawn(self, seed: int) -> tuple[Instance, ...]:
        return drawn_by(self.sampler, instances(self.environment, seed, self.group, self.least))

    # Cases are equal by value and few: what is computed of one is kept by the class.
    @property
    @lru_cache(maxsize=64)  # noqa: B019
    def candidates(self) -> dict[str, list[np.ndarray]]:
        """Named gradients (C, V) on every instance; those of the sampler only if it is another policy.

        KL(π‖μ) is infinite, and has no gradient, where a truncated sampler never draws what the policy would.
        """
        names = [name for name, row in ATLAS.items() if name != "zero" and not (self.on_policy and row.stale)]
        names += [name for name in self._added if not (self.on_policy and ATLAS[name].stale)]
        cut = not all(np.isfinite(instance.behaviour(self.sampler)).all() for instance in self.instances)
        known = {}
        for name in names:
            with suppress(*(InvalidEnvironmentError,) * cut):
                known[name] = [gradient(name, instance) for instance in self.instances]
        return known

    @property
    @lru_cache(maxsize=64)  # noqa: B019
    def basis(self) -> tuple[str, ...]:
        """Names of candidates of which none is a combination of earlier ones in environments of this kind.

        Few instances of a small environment have fewer free numbers than there are names: more are drawn for them.
        """
        drawn, seed = self.instances, self.seed
        columns = {name: [one.ravel() for one in g] for name, g in self.candidates.items() if not counts_alone(name)}
        while True:
            names = independent({name: np.concatenate(parts) for name, parts in columns.items()})
            if len(names) < sum(i.environment.n_contexts * (i.environment.vocabulary - 1) for i in drawn):
                return tuple(names)
            seed += FURTHER
            further = self._drawn(seed)
            drawn += further
            for name, parts in columns.items():
                parts += [gradient(name, instance).ravel() for instance in further]

    @property
    @lru_cache(maxsize=64)  # noqa: B019
    def candidates_at_parameters(self) -> dict[str, list[np.ndarray]]:
        """Named gradients with respect to the policy's own parameters."""
        return {name: self.at_parameters(gradients) for name, gradients in self.candidates.items()}

    @property
    def network(self) -> "Network | None":
        """The network whose weights are the policy's parameters; None if these are the logits themselves."""
        return network(self.instances[0].environment.vocabulary) if self.environment in NETWORKS else None

    @property
    def policy_seeds(self) -> list[tuple[int, ...]]:
        """Seeds of the network's weights, one an instance."""
        return [(policy,) for _, policy in seeds(self.environment, self.seed)]

    def at_parameters(self, gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Pull gradients back to the policy's own parameters: the logits themselves, or a network's weights.

        Args:
            gradients: (C, V) with respect to logits, one an instance.

        Returns:
            One array an instance. Of a gradient at a network's weights coordinates, which keep all inner products.
        """
        network = self.network
        if network is None:
            return list(gradients)
        drawn = zip(self.instances, self.policy_seeds, gradients, strict=True)
        return [parameter_gradient(instance, network, *seed).pull_back(one) for instance, seed, one in drawn]

    @property
    def freedom(self) -> int:
        """Free numbers of the fitted instances: V − 1 logits a context, or the weights if they are fewer."""
        fitted = self.instances[:-HELD_OUT]
        free = sum(i.environment.n_contexts * (i.environment.vocabulary - 1) for i in fitted)
        return free if self.network is None else min(free, len(fitted) * self.network.parameters)

    @property
    def length(self) -> int | None:
        """The common length of all rollouts in tokens, None if it varies."""
        lengths = self.instances[0].paths.lengths
        return int(lengths[0]) if (lengths == lengths[0]).all() else None

    def spelt(self, declared: Combination) -> Combination:
        """Return the declared combination in names that are independent in this environment.

        On a bandit local and sequence-level gradients are equal, so that the local names disappear.
        """
        declared = when_current(declared) if self.on_policy else declared
        return replaced(declared, replace(self, sampler="stale")._own)

    @lru_cache(maxsize=256)  # noqa: B019
    def _own(self, name: str) -> Combination:
        found = identify([gradient(name, i) for i in self.instances], self.candidates, basis=self.basis)
        return found.combination or {name: 1.0}


def left_out(case: Case) -> str:
    """Return in words what a truncated sampler keeps of the policy's probability, at least, in the case's instances."""
    token, rollout = (min(shares) for shares in zip(*map(kept_mass, case.instances), strict=True))
    return (
        f"{case.sampler} draws tokens that hold {token:.2g} of the policy's probability at least, and rollouts that "
        f"hold {rollout:.2g}; the others have no part in the gradient"
    )


# A gradient in long rollouts takes a third of a second.
_known = lru_cache(maxsize=256)(gradient)


def size(instance: Instance) -> float:
    """Return ‖∇KL(π‖ref)‖, the unit of all relative numbers."""
    return float(np.linalg.norm(_known("reverse_kl", instance)))


def target(declared: Combination, instance: Instance, sampler: str) -> np.ndarray:
    """Return the declared gradient (C, V) under a sampler; exactly zero if its terms cancel up to rounding."""
    return _target(tuple((when_current(declared) if sampler == "current" else declared).items()), instance)


@lru_cache(maxsize=256)
def _target(declared: tuple[tuple[str, float], ...], instance: Instance) -> np.ndarray:
    terms = [c * _known(name, instance) for name, c in declared]
    combined = sum(terms, np.zeros(instance.policy.shape))
    sizes = sum(float(np.linalg.norm(term)) for term in terms)
    found = np.zeros_like(combined) if np.linalg.norm(combined) <= CANCELS * sizes else combined
    found.setflags(write=False)
    return found


def relative_bias(found: np.ndarray, wanted: np.ndarray, unit: float) -> float:
    """Return ‖found − wanted‖ / ‖wanted‖, or over the unit ‖∇KL(π‖ref)‖ if `wanted` is zero."""
    norm = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / (norm if norm > 0 else unit)


def worst_cosine(
    gradients: list[np.ndarray], targets: list[np.ndarray], identification: Identification
) -> float | None:
    """Return the least cosine of a gradient with its target over the instances; None if one of them is zero."""
    if identification.combination == {"zero": 1.0}:
        return None
    norms = [float(np.linalg.norm(g) * np.linalg.norm(t)) for g, t in zip(gradients, targets, strict=True)]
    if not all(norms):
        return None
    return min(float((g * t).sum()) / norm for g, t, norm in zip(gradients, targets, norms, strict=True))
