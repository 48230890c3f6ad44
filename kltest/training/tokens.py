"""The KL part for estimators whose term of a token depends on that token's log-probs alone.

The gradient of the summed terms is then each term's own derivative, and a cost in the reward is credited by plain sums
over the rollout. The result is that of `Penalty`, up to rounding, in a fraction of the time: no rollouts are built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.moments.differentiate import backward
from kltest.training.batch import Batch
from kltest.training.penalty import Penalty, PenaltyGradient, weighted
from kltest.training.problems import Runs
from kltest.training.sums import total

FIELDS = frozenset({"logp", "ref_logp", "old_logp"})


class TokenPenalty(Penalty):
    """A `Penalty` of an estimator whose term of a token reads that token's log-probs alone."""

    def gradient(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray, *, log: bool) -> PenaltyGradient:
        """As `Penalty.gradient`."""
        tables = {"logp": policy, "ref_logp": self.runs.log_reference, "old_logp": sampler}
        value, gradient = self._valued({name: torch.from_numpy(batch.chosen(tables[name])) for name in self.loss.takes})
        if self.loss.placement != "loss":
            charged = self._charged(batch, value)
            gradient = charged if self.loss.placement == "reward" or gradient is None else gradient + charged
        logged = total(weighted(batch.along(value), batch.weights)) if log else None
        if gradient is None:
            return PenaltyGradient(logged=logged)
        weights = batch.weights if self.whole else batch.weights * self.runs.beta
        weights = weights if batch.live is None else np.where(batch.live, weights, 0.0)
        return PenaltyGradient(weighted(gradient, weights), None, logged)

    def _valued(self, fields: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the terms (T, M, R) of all tokens and, if placed in the loss, their derivatives."""
        own = {parameter: fields[name] for parameter, name in self.loss.fields.items()}
        arguments: dict[str, Any] = {**self.loss.settings, **own}
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
        """Cost (T, M, R) that the credit assigns to each token."""
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


def penalty_of(runs: Runs) -> Penalty:
    """The faster kind of penalty if the estimator is a built-in one whose term reads its token's log-probs alone."""
    penalty = Penalty(runs)
    spec, takes = penalty.loss.spec, penalty.loss.takes
    faster = penalty.built_in and spec is not None and spec.per_token and takes <= FIELDS and not penalty.own
    return TokenPenalty(runs) if faster else penalty
