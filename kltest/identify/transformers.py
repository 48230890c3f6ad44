"""The environment `transformer`: policy, reference and sampler are one small network with different weights.

The gradient that a loss follows is identified at all weights of the network, where it is Jᵀ times that at the logits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kltest.environments import Environment, Instance
from kltest.truth import ATLAS, gradient

if TYPE_CHECKING:
    from kltest.language_models.networks import Network, ParameterGradient

MODEL = "tiny:20k"


def drawn(environment: Environment, seed: int) -> Instance:
    """Return the environment with three networks as policies; UsageError if transformers is not installed."""
    return usual(environment.vocabulary).instance(environment, (seed,))


def parameters(vocabulary: int) -> int:
    """Return the number of weights of the network."""
    return usual(vocabulary).parameters


@lru_cache(maxsize=12)
def parameter_gradient(instance: Instance, network: Network, *seed: int) -> ParameterGradient:
    """Return the map from gradients at the logits to those at the weights, for an instance drawn from this seed."""
    from kltest.language_models.networks import ParameterGradient

    named = {name: gradient(name, instance) for name in ATLAS if name != "zero"}
    return ParameterGradient.at(network, instance.environment, network.drawn(seed), named)


@lru_cache(maxsize=4)
def usual(vocabulary: int) -> Network:
    """Return the network in which losses are graded."""
    import torch

    from kltest.language_models.networks import network

    return network(MODEL, vocabulary, 0, torch.device("cpu"))
