"""Policies that are small networks in environments whose rollouts can all be enumerated.

Policy, reference and sampler are one network with different weights. The model's first ids are the environment's
tokens; the id after them is the prompt. The logits in every context are a table that stays connected to the weights:
its Jacobian takes a gradient with respect to the table to one with respect to all weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kltest.environments import END, Environment, Instance
from kltest.environments.instance import largest_sum
from kltest.language_models.models import in_double, needs_transformers, parameters_asked, tiny_model
from kltest.loss.global_state import preserved


def tabulate(forward: Callable[[Tensor], Tensor], environment: Environment, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits of a causal language model in every context of a token environment.

    Args:
        forward: Maps ids (B, L) to logits (B, L, V or more). Logits of ids from V on are dropped.
        environment: An environment with C contexts, each of them a prefix, and V tokens.
        prompts: Ids before the rollouts of each prompt of the environment.

    Returns:
        (C, V) float64 with their graph; 0 in contexts that no rollout visits.
    """
    rows: list[Tensor] = []
    places: list[np.ndarray] = []
    for start, prompt in zip(environment.start, prompts, strict=True):
        contexts, ids = np.array([start]), np.array([prompt], dtype=np.int64)
        while len(contexts):  # the contexts at one length, and the ids that lead to them
            rows.append(forward(torch.from_numpy(ids))[:, -1, : environment.vocabulary].double())
            places.append(contexts)
            parent, token = np.nonzero(environment.successors[contexts, :, 0] != END)
            ids = np.concatenate([ids[parent], token[:, None]], axis=1)
            contexts = environment.successors[contexts[parent], token, 0]
    found = torch.cat(rows)
    empty = found.new_zeros((environment.n_contexts, environment.vocabulary))
    return empty.index_copy(0, torch.from_numpy(np.concatenate(places)), found)


Weights = dict[str, Tensor]
# Bounds on the summed log-ratio of a rollout, in nats, to the reference and to the sampler: clamps stay silent there.
DISTANCE, STALENESS = 2.0, 1.0
# Standard deviation of the first step, in root mean squares of each matrix; too large steps are shortened.
STEP = 1.0


class Network:
    """A causal model in float64 that is never changed: each policy brings its own weights."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        self.model, self.prompt = in_double(model).eval(), vocabulary
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                # With a padding id autograd's gradient of its embedding is 0, which is not the derivative.
                module.padding_idx = None
        self.origin: Weights = {name: one.detach() for name, one in self.model.named_parameters()}
        self.parameters = sum(one.numel() for one in self.origin.values())

    def table(self, weights: Weights, environment: Environment) -> Tensor:
        """Return (C, V) logits in every context, with the graph of weights that require a gradient."""

        def forward(ids: Tensor) -> Tensor:
            return torch.func.functional_call(self.model, weights, (ids,), {"use_cache": False}).logits

        return tabulate(forward, environment, [[self.prompt]] * len(environment.start))

    def drawn(self, seed: Sequence[int]) -> Weights:
        """Return the weights of one policy."""
        return self._shifted(self.origin, seed, STEP / 4)

    @torch.no_grad()
    def instance(self, environment: Environment, seed: Sequence[int]) -> Instance:
        """Return the environment with a policy of the seed, and a reference and a sampler a small step away from it."""
        weights = self.drawn(seed)
        policy = self.table(weights, environment)
        reference = self._near(weights, policy, environment, (*seed, 1), DISTANCE)
        sampler = self._near(weights, policy, environment, (*seed, 2), STALENESS)
        return Instance.of(environment, policy.numpy(), reference.numpy(), sampler.numpy())

    def _shifted(self, weights: Weights, seed: Sequence[int], size: float) -> Weights:
        """Weights plus normal noise of `size` times the root mean square of their matrix."""
        generator = np.random.default_rng(seed)
        found = {}
        for name, one in weights.items():
            noise = torch.from_numpy(generator.standard_normal(tuple(one.shape))).to(one)
            found[name] = one + size * one.square().mean().sqrt() * noise
        return found

    def _near(
        self, weights: Weights, policy: Tensor, environment: Environment, seed: Sequence[int], bound: float
    ) -> Tensor:
        """(C, V) logits of other weights, such that no rollout's summed log-ratio exceeds 0.9 of the bound."""
        size, log_policy = STEP, policy.log_softmax(dim=1)
        while True:
            other = self.table(self._shifted(weights, seed, size), environment)
            furthest = largest_sum(environment, (log_policy - other.log_softmax(dim=1)).abs().numpy())
            if furthest < 0.9 * bound:
                return other
            size *= max(0.1, min(0.8, bound / furthest))


@dataclass(frozen=True)
class ParameterGradient:
    """The map from gradients at the logits to gradients at all weights of one network.

    With J = RᵀQᵀ the derivative (C·V, P) of logits by weights and Q orthonormal, a gradient Jᵀg at the weights is given
    by its coordinates R g in the columns of Q: all inner products, and so every fit, are those of whole vectors.

    Attributes:
        coordinates: R (K, C·V), K the smaller of C·V and the number P of weights.
    """

    coordinates: np.ndarray

    @classmethod
    def at(cls, network: Network, environment: Environment, weights: Weights) -> "ParameterGradient":
        """Return the map at the given weights."""
        own = {name: one.detach().requires_grad_() for name, one in weights.items()}
        logits, leaves = network.table(own, environment).ravel(), tuple(own.values())
        each = torch.eye(len(logits), dtype=logits.dtype)
        found = torch.autograd.grad(logits, leaves, each, is_grads_batched=True, materialize_grads=True)
        jacobian = torch.cat([part.flatten(start_dim=1) for part in found], dim=1)
        return cls(torch.linalg.qr(jacobian.T, mode="r").R.numpy())

    def pull_back(self, gradient: np.ndarray) -> np.ndarray:
        """Return the coordinates (K,) of a gradient (C, V) with respect to logits."""
        return self.coordinates @ gradient.ravel()


@lru_cache(maxsize=4)
def network(model: str, vocabulary: int) -> Network:
    """Return a small Llama with random weights, "tiny" or "tiny:SIZE"; UsageError without transformers."""
    needs_transformers()
    with preserved(0):
        made: Any = tiny_model(parameters_asked(model), vocabulary + 1, vocabulary - 1, vocabulary)
        for one in made.parameters():
            if one.dim() == 2:
                # Sums over a row get variance one: contexts differ, and no distribution is nearly uniform.
                nn.init.normal_(one, std=one.shape[1] ** -0.5)
    return Network(made, vocabulary)
