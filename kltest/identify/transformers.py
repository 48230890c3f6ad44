"""The environment `transformer`: policy, reference and sampler are one small network with different weights.

The gradient that a loss follows is identified at all weights of the network, where it is Jᵀ times that at the logits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kltest.environments import Instance
from kltest.truth import ATLAS, gradient

if TYPE_CHECKING:
    from kltest.language_models.networks import Network, ParameterGradient

MODEL = "tiny:20k"


@lru_cache(maxsize=12)
def parameter_gradient(instance: Instance, network: Network, *seed: int) -> ParameterGradient:
    """Return the map from gradients at the logits to those at the weights, for an instance drawn from this seed."""
    from kltest.language_models.networks import ParameterGradient

    named = {name: gradient(name, instance) for name in ATLAS if name != "zero"}
    return ParameterGradient.at(network, instance.environment, network.drawn(seed), named)


def usual(vocabulary: int) -> Network:
    """Return the network in which losses are graded; UsageError if transformers is not installed."""
    import torch

    from kltest.language_models.networks import network

    return network(MODEL, vocabulary, 0, torch.device("cpu"))
