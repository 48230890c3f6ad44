"""Environments in which a loss is graded: small, mild, drawn from the seed, three instances to fit on, one held out.

Losses that couple the rollouts of a group have environments of their own, under the same names: few enough
rollouts to enumerate every group, and a reward of 0 or 1 a rollout, equally often, so that some groups are tied.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from kltest.environments import (
    END,
    Environment,
    Instance,
    OfSome,
    Paths,
    bandit,
    mdp,
    of_choices,
    ragged,
    sequence,
    tabular,
)
from kltest.environments.policies import table

if TYPE_CHECKING:
    from kltest.language_models.networks import Network, ParameterGradient

FITTED = 3
HELD_OUT = 1
# Groups are called one by one if a loss takes one group a call, about half a millisecond each.
MOST_GROUPS = 1_000
# Random assignments of rewards, of which the most even one is taken.
ASSIGNMENTS = 200


Draw = Callable[..., Environment]


def _with_reward(build: Callable[..., Environment], usual: int, *size: int) -> Draw:
    def draw(seed: int, least: int = 0) -> Environment:
        vocabulary = max(usual, least)
        contexts = build(vocabulary, *size).n_contexts
        reward = np.random.default_rng(seed).standard_normal((contexts, vocabulary))
        return build(vocabulary, *size, reward=reward)

    return draw


ENVIRONMENTS: dict[str, Draw] = {
    "bandit": _with_reward(bandit, 4),
    "sequence": _with_reward(sequence, 3, 3),
    "ragged": _with_reward(ragged, 3, 3),
    "mdp": lambda seed, least=0: mdp(5, max(3, least), 3, seed=seed),
    "transformer": _with_reward(sequence, 4, 3),
    "turns": lambda seed, least=0: _turns()[0],
}
"""Environments by name, of a seed and, for a loss that takes a support, of the least number of tokens to choose from.

Those of groups, and turns, keep theirs: the support is smaller there (`kltest.names.support_size`)."""
TURNS = "turns"
"""Two turns of two tokens, and two masked columns of tool output between them."""
# Logit of a certain token above the others: 59 of them leave 6e-12, and a log-prob of −30 is legal everywhere.
CERTAIN = 30.0
NETWORKS = frozenset({"transformer"})
"""Environments in which policy, reference and sampler are one small network with different weights."""
MODEL = "tiny:20k"


def _turns(vocabulary: int = 3, tokens: int = 2, between: int = 2) -> tuple[Environment, Paths, np.ndarray]:
    first, tool, length = range(tokens), range(tokens, tokens + between), 2 * tokens + between
    return of_choices(vocabulary, length, (*first, *range(tokens + between, length)), tool, name=TURNS)


def _in_turns(own_seed: int, policy_seed: int, group: int | None) -> Instance:
    """Draw an instance of two turns, of one token each for groups; tool output is certain under all policies."""
    environment, rollouts, chosen = _turns() if group is None else _turns(2, 1, between=5)
    reward = np.random.default_rng(own_seed).standard_normal(environment.reward.shape) * chosen[:, None]
    drawn = Instance.draw(replace(environment, reward=reward), policy_seed)
    tool = np.arange(environment.vocabulary) == 0
    tables = (
        table(np.where(chosen[:, None], logits, CERTAIN * tool))
        for logits in (drawn.policy, drawn.reference, drawn.sampler)
    )
    return OfSome(drawn.environment, *tables, some=rollouts)


def _layered(horizon: int, seed: int) -> Environment:
    """A process of two states a step, told apart by the step, so that a rollout's last choice can decide its reward."""
    generator = np.random.default_rng(seed)
    states = 2 * horizon
    following = 2 * (np.arange(states) // 2 + 1)[:, None, None] + np.arange(2)
    chances = generator.dirichlet(np.ones(2), size=(states, 2))
    start = np.zeros(states)
    start[:2] = 0.5
    successors = np.where(following < states, following, END).repeat(2, axis=1)
    last = (successors == END).all(axis=2)
    successors[last, 1:] = 0
    chances[last] = (1.0, 0.0)
    return tabular(successors, chances, np.zeros((states, 2)), horizon, start=start)


# In order of size, the largest first: the first one of which all groups can be enumerated is taken. For pairs, a third
# token makes T differ from B, so that (B,) and (B, T) are not confused.
_OF_GROUPS: dict[str, tuple[Callable[[int], Environment], ...]] = {
    "bandit": (lambda seed: bandit(4), lambda seed: bandit(3)),
    "sequence": (lambda seed: sequence(3, 2), lambda seed: sequence(2, 2)),
    "ragged": (lambda seed: ragged(3, 2), lambda seed: ragged(2, 2)),
    "mdp": (partial(_layered, 2),),
    "transformer": (lambda seed: sequence(3, 2), lambda seed: sequence(2, 2)),
}
_OF_PAIRS: dict[str, tuple[Callable[[int], Environment], ...]] = {
    **_OF_GROUPS,
    "sequence": (lambda seed: sequence(3, 3),),
    "ragged": (lambda seed: ragged(3, 3),),
    "mdp": (partial(_layered, 3),),
    "transformer": (lambda seed: sequence(3, 3),),
}


@lru_cache(maxsize=128)
def instances(environment: str, seed: int, group: int | None = None, least: int = 0) -> tuple[Instance, ...]:
    """Return the instances of an environment that a loss is graded on, the held-out one last.

    Log-ratios are small (|Σ log π/ref| < 2 and |Σ log π/μ| < 1 along every rollout), so that clamps do not act and
    nothing overflows.

    Args:
        environment: A name of ENVIRONMENTS.
        seed: Seed of environments and policies.
        group: Rollouts in a group, for a loss that couples the rollouts of a prompt; None for single rollouts.
        least: Tokens to choose from, at least, where single rollouts are enumerated.
    """
    grouped = group is not None and environment != TURNS
    build = _of_groups(environment, group) if grouped else partial(ENVIRONMENTS[environment], least=least)  # type: ignore[arg-type]
    drawn = []
    for own_seed, policy_seed in seeds(environment, seed):
        built = replace(build(own_seed), name=environment)
        if environment == TURNS:
            instance = _in_turns(own_seed, policy_seed, group)
        elif environment in NETWORKS:
            instance = network(built.vocabulary).instance(built, (policy_seed,))
        else:
            instance = Instance.draw(built, policy_seed)
        drawn.append(instance if group is None else with_ties(instance, own_seed))
    return tuple(drawn)


def seeds(environment: str, seed: int) -> list[tuple[int, int]]:
    """Return seeds of the environment and of the policies, a pair for each instance."""
    salt = zlib.crc32(environment.encode())
    children = np.random.SeedSequence([seed, salt]).spawn(FITTED + HELD_OUT)
    states = (child.generate_state(2) for child in children)
    return [(int(own), int(policy)) for own, policy in states]


def _of_groups(environment: str, size: int) -> Callable[[int], Environment]:
    builders = (_OF_PAIRS if size == 2 else _OF_GROUPS)[environment]
    return next((build for build in builders if _groups(build(0), size) <= MOST_GROUPS), builders[-1])


def _groups(environment: Environment, size: int) -> int:
    """Count the groups of rollouts of one prompt, as multisets."""
    prompts = len(environment.prompts)
    return prompts * math.comb(int(environment.count()) // prompts + size - 1, size)


def with_ties(instance: Instance, seed: int) -> Instance:
    """Return the instance with a reward of 0 or 1 at the end of each rollout, each with a probability near one half."""
    paths, environment = instance.paths, instance.environment
    last = np.arange(len(paths)), paths.shape[1] - 1 - paths.mask[:, ::-1].argmax(axis=1)
    cells = paths.contexts[last] * environment.vocabulary + paths.tokens[last]
    ends, place = np.unique(cells, return_inverse=True)
    paid = np.random.default_rng(seed).integers(2, size=(ASSIGNMENTS, len(ends))).astype(float)
    uneven = np.zeros(ASSIGNMENTS)
    for sampler in ("current", "stale"):
        chances = instance.rollout_weights(sampler) / environment.prompts[paths.prompt]
        for prompt in range(len(environment.prompts)):
            rows = paths.prompt == prompt
            uneven = np.maximum(uneven, np.abs(paid[:, place[rows]] @ chances[rows] - 0.5))
    reward = np.zeros(environment.reward.shape)
    reward.reshape(-1)[ends] = paid[uneven.argmin()]
    return replace(instance, environment=replace(environment, reward=reward))


def network(vocabulary: int) -> "Network":
    """Return the network in which losses are graded; UsageError if transformers is not installed."""
    from kltest.language_models import networks

    return networks.network(MODEL, vocabulary)


@lru_cache(maxsize=12)
def parameter_gradient(instance: Instance, network: "Network", *seed: int) -> "ParameterGradient":
    """Return the map from gradients at the logits to those at all weights, for an instance drawn from this seed."""
    from kltest.language_models.networks import ParameterGradient

    return ParameterGradient.at(network, instance.environment, network.drawn(seed))
