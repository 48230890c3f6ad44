"""The world `transformer`: policy, reference and sampler are one small network with other weights, and shared ones.

What a loss follows there is asked at all weights of the network, where a gradient is Jᵀ times that at the logits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kltest.environments import Environment, Instance
from kltest.truth import ATLAS, gradient

if TYPE_CHECKING:
    from kltest.language_models.networks import Network, Pulled

MODEL = "tiny:20k"


def drawn(environment: Environment, seed: int) -> Instance:
    """The world with three networks in it, a mild step apart; UsageError where transformers is not installed."""
    return _network(environment.vocabulary).instance(environment, (seed,))


def parameters(vocabulary: int) -> int:
    """How many weights the network has."""
    return _network(vocabulary).parameters


@lru_cache(maxsize=16)
def pulled(instance: Instance, seed: int) -> Pulled:
    """What takes a gradient at the logits of an instance that was drawn from this seed to the weights."""
    from kltest.language_models.networks import Pulled

    network = _network(instance.environment.vocabulary)
    named = {name: gradient(name, instance) for name in ATLAS if name != "zero"}
    return Pulled.at(network, instance.environment, network.drawn((seed,)), named)


@lru_cache(maxsize=4)
def _network(vocabulary: int) -> Network:
    import torch

    from kltest.language_models.networks import network

    return network(MODEL, vocabulary, 0, torch.device("cpu"))
