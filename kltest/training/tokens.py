"""The KL part of an estimator that values every token by itself: no rollouts are built, and costs are added by hand.

Where the term of a token depends on that token's log-probs alone, the gradient of all terms together is, token by
token, the derivative of its own; and what is charged to a token for a cost in the reward is a sum over the rollout.
This is what `Penalty` finds by autograd through whole rollouts, in a fraction of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.moments.differentiate import backward
from kltest.training.batch import Batch
from kltest.training.penalty import Penalty, Pull, weighted
from kltest.training.problems import PerRun
from kltest.training.sums import total
from kltest.training.world import World

FIELDS = frozenset({"logp", "ref_logp", "old_logp"})


class TokenPenalty(Penalty):
    """A `Penalty` for which `apart(penalty)` holds."""

    def pull(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray, *, log: bool) -> Pull:
        """As `Penalty.pull`."""
        tables = {"logp": policy, "ref_logp": self.world.log_reference, "old_logp": sampler}
        value, gradient = self._valued({name: torch.from_numpy(batch.chosen(tables[name])) for name in self.loss.takes})
        if self.loss.placement != "loss":
            charged = self._charged(batch, value)
            gradient = charged if self.loss.placement == "reward" or gradient is None else gradient + charged
        logged = total(weighted(batch.along(value), batch.weights)) if log else None
        if gradient is None:
            return Pull(logged=logged)
        weights = batch.weights if self.whole else batch.weights * self.world.beta
        weights = weights if batch.live is None else np.where(batch.live, weights, 0.0)
        return Pull(weighted(gradient, weights), None, logged)

    def _valued(self, fields: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray | None]:
        """(T, M, R) the terms of all tokens, and their derivatives if they stand in the loss."""
        arguments: dict[str, Any] = dict(self.loss.settings)
        for parameter, name in self.loss.fields.items():
            arguments[parameter] = fields[name]
        if self.loss.placement == "reward" or "logp" not in fields:
            return self.loss.function(**arguments).numpy(), None
        leaf = fields["logp"].requires_grad_()
        arguments.update({parameter: leaf for parameter, name in self.loss.fields.items() if name == "logp"})
        with torch.enable_grad():
            value = self.loss.function(**arguments)
            objective = value.sum()
        gradient = backward(self.loss, objective, [leaf])[0] if objective.requires_grad else None
        return value.detach().numpy(), None if gradient is None else gradient.numpy()

    def _charged(self, batch: Batch, cost: np.ndarray) -> np.ndarray:
        """(T, M, R) the cost that each token is held to account for."""
        if batch.live is not None:
            cost = np.where(batch.live, cost, 0.0)
        if self.loss.credit == "immediate" or len(cost) == 1:
            return cost
        if self.loss.credit == "return":
            return np.broadcast_to(total(cost), batch.shape)
        left = cost.copy()
        for step in reversed(range(len(left) - 1)):
            left[step] += left[step + 1]
        return left


def apart(penalty: Penalty) -> bool:
    """Whether the estimator is one of ours that values each token by that token's log-probs."""
    spec, options = penalty.loss.spec, penalty.world.runs[0].options.values()
    ours = penalty.trusted and spec is not None and spec.per_token
    return ours and penalty.loss.takes <= FIELDS and not any(isinstance(value, PerRun) for value in options)


def penalty_of(world: World) -> Penalty:
    """The KL part of the runs of a world, by the shortest way."""
    penalty = Penalty(world)
    return TokenPenalty(world) if apart(penalty) else penalty
