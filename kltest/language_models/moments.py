"""The exact moments of any loss with respect to the parameters of a torch module.

With J the derivative of the table of logits with respect to the parameters, a rollout's gradient is Jᵀĝ. Its
expectation is one backward pass; its square takes each rollout's own, a batch of backward passes at a time, or J
itself where the table has fewer entries than there are rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from kltest.environments import Instance, Paths
from kltest.errors import UsageError
from kltest.language_models.tables import pull_back, trainable
from kltest.loss.outcome import Loss
from kltest.moments.enumeration import exact
from kltest.moments.moments import Moments
from kltest.moments.projection import Projection, each_gradient

# Bytes of gradients held at once.
MEMORY = 2**28


@dataclass(frozen=True)
class ModuleMoments:
    """`gradient` = E[ĝ] by parameter name, `second_moment` = E‖ĝ‖² over all parameters, of a batch of one rollout.

    `table` holds the moments with respect to the table of logits, and all else that is known of the loss.
    """

    gradient: dict[str, np.ndarray]
    second_moment: float
    table: Moments

    @property
    def variance(self) -> float:
        """Trace of the covariance of one rollout's gradient."""
        return max(self.second_moment - sum(float((part**2).sum()) for part in self.gradient.values()), 0.0)


def exact_module(
    loss: Loss,
    module: nn.Module,
    logits: Tensor,
    instance: Instance,
    sampler: str = "current",
    *,
    padding: int = 0,
    seed: int = 0,
) -> ModuleMoments:
    """E[ĝ], E‖ĝ‖² with respect to a module's parameters, where ĝ is the gradient of a batch of one rollout.

    `logits` (C, V) is the table that the module computes, with its graph (`tables.tabulate`), and the policy of
    `instance`. Raises what `exact` raises, and UsageError if the instance has another policy.
    """
    if np.abs(torch.log_softmax(logits.detach(), dim=1).numpy() - instance.policy).max() > 1e-12:
        raise UsageError("the instance's policy is not the module's: make it with `tables.instance_of`")
    made: list[_Pulled] = []

    def projection() -> _Pulled:
        made.append(_Pulled(instance, module, logits))
        return made[-1]

    moments = exact(loss, instance, sampler, padding=padding, seed=seed, projection=projection)
    return ModuleMoments(pull_back(moments.gradient, logits, module), made[-1].pulled_second_moment, moments)


class _Pulled(Projection):
    """Adds up rollouts as for the table, and the squares of their gradients at the parameters beside it."""

    def __init__(self, instance: Instance, module: nn.Module, logits: Tensor) -> None:
        super().__init__(instance.policy, distinct=instance.environment.tree)
        self.pulled_second_moment = 0.0
        self._logits = logits
        self._parameters = [parameter for _, parameter in trainable(module)]
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self._rows = max(1, MEMORY // (8 * max(self._size, self.policy.size)))
        entries = self.policy.size
        keeps = entries <= len(instance.paths) and entries * self._size * 8 <= MEMORY
        self._jacobian = self._pull(np.eye(entries)) if keeps else None

    def add(self, paths: Paths, weights: np.ndarray, logp: np.ndarray | None, logits: np.ndarray | None) -> None:
        super().add(paths, weights, logp, logits)
        if logp is None and logits is None:
            return
        for rows, part in paths.split(self._rows):
            each = each_gradient(
                part, self.policy, None if logp is None else logp[rows], None if logits is None else logits[rows]
            ).reshape(len(part), -1)
            pulled = self._pull(each) if self._jacobian is None else torch.from_numpy(each) @ self._jacobian
            self.pulled_second_moment += float(torch.from_numpy(weights[rows]) @ (pulled**2).sum(dim=1))

    def _pull(self, each: np.ndarray) -> Tensor:
        """(n, C·V) → (n, number of parameters): backward passes, several at a time where the module allows it."""
        directions = torch.from_numpy(each).reshape(-1, *self._logits.shape)
        try:
            found = torch.autograd.grad(
                self._logits, self._parameters, directions, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            return self._joined(found, len(directions))
        except RuntimeError:
            single = [
                self._joined(
                    torch.autograd.grad(
                        (self._logits * one).sum(), self._parameters, retain_graph=True, allow_unused=True
                    ),
                    1,
                )
                for one in directions
            ]
            return torch.cat(single)

    def _joined(self, parts: tuple[Tensor | None, ...], rows: int) -> Tensor:
        flat = [
            torch.zeros((rows, parameter.numel()), dtype=torch.float64)
            if part is None
            else part.reshape(rows, -1).double()
            for part, parameter in zip(parts, self._parameters, strict=True)
        ]
        return torch.cat(flat, dim=1)
