"""Causal models over worlds that can be enumerated: policy, reference and sampler are one network with other weights.

The model's first ids are the world's tokens, the one after them is the prompt. A gradient with respect to the table of
logits that a network computes becomes one with respect to all its weights by one backward pass. It is kept as its
coordinates in an orthonormal basis of the named gradients there, with the length of what stands outside: all inner
products with named gradients, and so every fit of them, are those of the vectors of all weights themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kltest.environments import Environment, Instance
from kltest.environments.instance import largest_sum
from kltest.errors import UsageError
from kltest.language_models.models import in_double, needs_transformers, parameters_asked, pretrained, tiny_model
from kltest.language_models.tables import instance_of, tabulate
from kltest.loss.global_state import preserved

Weights = dict[str, Tensor]
# As far as reference and sampler are from the policy along any rollout, in nats: clamps stay silent there.
DISTANCE, STALENESS = 2.0, 1.0
# The first step is this share of each matrix's root mean square; steps are shortened until they are mild.
STEP = 1.0
TRIES = 40


class Network:
    """A causal model in float64, never changed: its weights are given anew for each policy."""

    def __init__(self, model: nn.Module, vocabulary: int, device: torch.device) -> None:
        self.model = in_double(model).to(device).eval()
        self.prompt, self.device = vocabulary, device
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                # Otherwise no gradient reaches the embedding of one id, and what autograd gives is no derivative.
                module.padding_idx = None
        self.origin: Weights = {name: one.detach() for name, one in self.model.named_parameters()}
        self.parameters = sum(one.numel() for one in self.origin.values())
        known = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        if known <= vocabulary:
            raise UsageError(
                f"vocabulary: the model has {known} ids, of which {vocabulary} are to be tokens and one the prompt; "
                f"set vocabulary={known - 1} or less"
            )

    def table(self, weights: Weights, environment: Environment) -> Tensor:
        """(C, V) logits in every context, on the CPU, with the graph of those weights that require one."""

        def forward(ids: Tensor) -> Tensor:
            answer = torch.func.functional_call(self.model, weights, (ids.to(self.device),), {"use_cache": False})
            return getattr(answer, "logits", answer)[:, :, : environment.vocabulary].cpu()

        return tabulate(forward, environment, prompts=[[self.prompt]] * len(environment.start))

    def shifted(self, weights: Weights, seed: Sequence[int], size: float) -> Weights:
        """Every weight off by a normal number times `size` times the root mean square of its matrix."""
        generator = np.random.default_rng(seed)
        found = {}
        for name, one in weights.items():
            noise = torch.from_numpy(generator.standard_normal(tuple(one.shape))).to(one)
            found[name] = one + size * one.square().mean().sqrt() * noise
        return found

    def drawn(self, seed: Sequence[int]) -> Weights:
        """The weights of one policy."""
        return self.shifted(self.origin, seed, STEP / 4)

    @torch.no_grad()
    def instance(self, environment: Environment, seed: Sequence[int]) -> Instance:
        """The world with three networks: a policy, and a reference and a sampler a mild step away in weights."""
        weights = self.drawn(seed)
        policy = self.table(weights, environment)
        reference = self._near(weights, policy, environment, (*seed, 1), DISTANCE)
        return instance_of(
            environment, policy, reference, self._near(weights, policy, environment, (*seed, 2), STALENESS)
        )

    def _near(
        self, weights: Weights, policy: Tensor, environment: Environment, seed: Sequence[int], bound: float
    ) -> Tensor:
        """The logits of weights off by so much that no rollout's summed log-ratio is beyond 0.9 of the bound."""
        size, log_policy = STEP, policy.log_softmax(dim=1)
        for _ in range(TRIES):
            other = self.table(self.shifted(weights, seed, size), environment)
            furthest = largest_sum(environment, (log_policy - other.log_softmax(dim=1)).abs().numpy())
            if furthest < 0.9 * bound:
                return other
            size *= max(0.1, min(0.8, bound / furthest)) if np.isfinite(furthest) else 0.1
        raise UsageError(
            f"no weights near the model's give a policy that is less than {bound:g} nats away along every rollout: are "
            "the logits of its first ids finite?"
        )


@dataclass(frozen=True)
class Pulled:
    """Gradients at all weights of one network, in K + 1 coordinates: the K named ones, and what `of` is asked for.

    `factor` = ‖∇KL(π‖ref)‖ at the weights over that at the logits: what turns sizes there into sizes here.
    """

    logits: Tensor
    leaves: tuple[Tensor, ...]
    basis: Tensor
    names: Mapping[str, np.ndarray]
    factor: float

    @classmethod
    def at(
        cls, network: Network, environment: Environment, weights: Weights, named: Mapping[str, np.ndarray]
    ) -> Pulled:
        """`named` are (C, V) gradients with respect to logits, "reverse_kl" first."""
        own = {name: one.detach().requires_grad_() for name, one in weights.items()}
        logits, leaves = network.table(own, environment), tuple(own.values())
        rows = [_pull(logits, leaves, one) for one in named.values()]
        lengths = [float(row.norm()) or 1.0 for row in rows]
        basis, triangle = torch.linalg.qr(torch.stack([row / n for row, n in zip(rows, lengths, strict=True)]).T)
        along = (triangle.cpu() * torch.tensor(lengths, dtype=torch.float64)).T.numpy()
        names = {name: np.append(one, 0.0) for name, one in zip(named, along, strict=True)}
        first = float(np.linalg.norm(named["reverse_kl"]))
        return cls(logits, leaves, basis, names, float(np.linalg.norm(names["reverse_kl"])) / first)

    def of(self, gradient: np.ndarray) -> np.ndarray:
        """(K + 1,) coordinates of Jᵀ·gradient: along the basis, and the length of the rest."""
        whole = _pull(self.logits, self.leaves, gradient)
        along = self.basis.T @ whole
        return np.append(along.cpu().numpy(), float((whole - self.basis @ along).norm()))


def _pull(logits: Tensor, leaves: tuple[Tensor, ...], gradient: np.ndarray) -> Tensor:
    """(P,) the gradient at all weights, where they are."""
    objective = (logits * torch.from_numpy(np.ascontiguousarray(gradient))).sum()
    found = torch.autograd.grad(objective, leaves, retain_graph=True, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(leaf).ravel() if part is None else part.ravel()
            for leaf, part in zip(leaves, found, strict=True)
        ]
    )


def network(model: str, vocabulary: int, seed: int, device: torch.device) -> Network:
    """A small Llama with weights drawn from the seed ("tiny", "tiny:SIZE"), or a model of Hugging Face's.

    Raises UsageError for a model that there is not or that has too few ids.
    """
    needs_transformers()
    if model != "tiny" and not model.startswith("tiny:"):
        return Network(pretrained(model)[0], vocabulary, device)
    size = parameters_asked(model)
    with preserved(seed):
        made: Any = tiny_model(size, vocabulary + 1, vocabulary - 1, vocabulary)
        for one in made.parameters():
            if one.dim() == 2:
                # Sums over a row are of size one, so that contexts differ and no distribution is nearly uniform.
                nn.init.normal_(one, std=one.shape[1] ** -0.5)
    return Network(made, vocabulary, device)
