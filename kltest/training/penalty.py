"""The KL part of the gradient: an estimator called on the rows of many runs, differentiated at their log-probs.

Autograd covers the estimator alone; the gradients of softmax and of sums over rows are written out by hand. Rows of
different runs share a call if the estimator treats rows separately or couples them by `group`. Any other estimator is
called once for each batch of each run.
"""

from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.moments.caller import BatchOfOneError
from kltest.moments.differentiate import backward, leaf_gradients
from kltest.moments.reduction import probe
from kltest.rollout import LEAVES, Rollout
from kltest.training.batch import Batch, total
from kltest.training.problems import Runs, bound, is_built_in

# Fields that the terms of a `TokenPenalty` read.
FIELDS = frozenset({"logp", "ref_logp", "old_logp"})
# Rollouts on which a user-defined function is tested for coupling between the rows of a batch.
PROBED = 12


@dataclass(frozen=True)
class PenaltyGradient:
    """Gradient of the KL part, weighted by the rows' weights, None if it is zero.

    `logp` (T, M, R) is with respect to the sampled tokens' log-probs, `logits` (M·R, T, V) to those of all next tokens;
    `logged` (R,) is the KL that the estimator logs, None if not recorded.
    """

    logp: np.ndarray | None = None
    logits: np.ndarray | None = None
    logged: np.ndarray | None = None


class Penalty:
    """The estimator of several runs, and its gradient on a batch."""

    def __init__(self, runs: Runs) -> None:
        run = runs.each[0]
        self.loss, self.runs, self.whole = bound(run), runs, run.whole
        # Built-in estimators are called directly. A user-defined function gets copies, converted to the types it needs.
        self.built_in = is_built_in(self.loss)
        self.couples = self.loss.spec.couples if self.built_in and self.loss.spec is not None else self._tested()
        self.alone = self.couples and not (self.built_in and "group" in self.loss.takes)

    def _tested(self) -> bool:
        """Call the function on a few rollouts; return whether it couples rows or returns one number for a batch."""
        instance = Instance.draw(self.runs.environment, 0)
        generator = np.random.default_rng(0)
        pool = Rollout.of(instance, instance.environment.sample(instance.policy, PROBED, generator))
        try:
            caller = probe(self.loss, pool, generator)
        except BatchOfOneError:
            return True
        return caller.reduction != "per-row" or any(
            single.outcome.metric is not None and single.outcome.metric.dim() == 0 for single in caller.singles.values()
        )

    def gradient(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray, *, log: bool) -> PenaltyGradient:
        """Gradient of β times the KL part, or of the whole loss, on a batch; log-probs are (V, C, R) tables."""
        fields = self._fields(batch, policy, sampler)
        call = self._one_by_one if self.alone else self._together
        found, logged = call(fields, batch, log)
        # Calls of single batches are weighted already, one weight a call.
        shares = np.ones_like(batch.weights) if self.alone else batch.weights
        if not (self.whole or self.loss.takes_beta):
            shares = shares * self.runs.beta
        weights = np.broadcast_to(shares, batch.shape)
        weights = weights if batch.live is None else np.where(batch.live, weights, 0.0)
        parts: dict[str, np.ndarray | None] = dict.fromkeys(LEAVES)
        for leaf, part in found.items():
            if part.dim() == 2:
                parts[leaf] = weighted(batch.steps(part.numpy()), weights)
            else:
                parts[leaf] = weighted(part.numpy(), batch.rows(weights)[:, :, None])
        return PenaltyGradient(parts["logp"], parts["logits"], logged)

    def _together(self, fields: dict[str, Any], batch: Batch, log: bool) -> tuple[dict[str, Tensor], np.ndarray | None]:
        """Make one call for the rows of all runs."""
        rollout = Rollout(fields, beta=float(self.runs.each[0].beta))
        objective, logged = self._call(rollout, placed=batch.live is not None)
        gradients = leaf_gradients(self.loss, objective.sum(), rollout)
        if not log:
            return gradients, None
        values = logged.numpy()
        each = batch.along(batch.steps(values)) if values.ndim == 2 else values.reshape(batch.shape[1:])
        return gradients, total(weighted(each, batch.weights))

    def _one_by_one(
        self, fields: dict[str, Any], batch: Batch, log: bool
    ) -> tuple[dict[str, Tensor], np.ndarray | None]:
        """Make a call for each batch or, if rows are enumerated, for each group."""
        _, rows, runs = batch.shape
        size = (batch.group_size or 1) if batch.exact else rows
        base = Rollout(fields)
        if not self.built_in:
            self.loss.settle(base)
        found: dict[str, Tensor] = {}
        logged = np.zeros(runs)
        for run, first in product(range(runs), range(0, rows, size)):
            weight = float(batch.weights[first, run]) * size if batch.exact else 1.0
            if weight == 0:
                continue
            part = torch.arange(first, first + size) * runs + run
            rollout = base.take(part, beta=float(self.runs.each[run].beta))
            objective, metric = self._call(rollout)
            objective = objective if objective.dim() == 0 else objective.mean()
            for leaf, gradient in leaf_gradients(self.loss, objective * weight, rollout).items():
                if leaf not in found:
                    found[leaf] = torch.zeros((rows * runs, *gradient.shape[1:]), dtype=torch.float64)
                found[leaf][part] = gradient
            if metric.dim() == 2:
                metric = torch.where(rollout.peek("mask") != 0, metric, 0.0).sum(dim=1)
            logged[run] += weight * float(metric.mean())
        return found, logged if log else None

    def _call(self, rollout: Rollout, *, placed: bool = True) -> tuple[Tensor, Tensor]:
        """Return the placed loss, (B,) or a scalar, and the logged KL, detached.

        Without `placed` a per-token loss may keep its shape: if all tokens are live, its sum is the same.
        """
        beta = rollout.peek("beta")
        value, metric = self._returned(rollout, beta)
        if self.loss.takes_beta and not (self.whole or self.loss.shaped):
            # Of a loss that takes β, the KL term is the difference that β makes.
            value = value - self._returned(rollout, 0.0)[0]
        logged = value.detach() if metric is None else metric
        if self.loss.placement == "loss" and not placed:
            return value, logged
        return self.loss.placed(value, rollout), logged

    def _returned(self, rollout: Rollout, beta: float) -> tuple[Tensor, Tensor | None]:
        """Return the estimator's value in float64 and the KL among its metrics."""
        if not self.built_in:
            result = self.loss.returned(rollout, beta)
            return result.loss.to(torch.float64), result.metric
        fillings = self.loss.arguments.fillings
        fields = {
            parameter: beta if name == "beta" else fillings[parameter].at(rollout)
            for parameter, name in self.loss.fields.items()
        }
        with torch.enable_grad():
            answer = self.loss.function(**{**self.loss.call.arguments, **fields})
        return (answer[0], answer[1]["kl"]) if isinstance(answer, tuple) else (answer, None)

    def _fields(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray) -> dict[str, Any]:
        """All fields of a rollout, (M·R, …), built when they are read."""
        steps, rows, runs = batch.shape

        def reward() -> np.ndarray:
            return batch.along(batch.chosen(self.runs.reward))

        def advantage() -> Tensor:
            earned = reward()
            return torch.from_numpy((earned - batch.mean(earned)).reshape(-1))

        fields: dict[str, Any] = {
            "mask": lambda: (
                torch.ones(rows * runs, steps, dtype=torch.float64)
                if batch.live is None
                else torch.from_numpy(batch.rows(batch.live).astype(float))
            ),
            "tokens": lambda: torch.from_numpy(batch.rows(batch.cells.reshape(batch.shape)) // policy[0].size),
            "reward": lambda: torch.from_numpy(reward().reshape(-1)),
            "advantage": advantage,
            "group": lambda: torch.from_numpy(batch.groups.reshape(-1)),
        }
        for prefix, table in {"": policy, "ref_": self.runs.log_reference, "old_": sampler}.items():
            fields[f"{prefix}logp"] = lambda table=table: torch.from_numpy(batch.rows(batch.chosen(table)))
            fields[f"{prefix}logits"] = lambda table=table: torch.from_numpy(batch.next_tokens(table))
        return fields


def weighted(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Product of values and weights, 0 wherever the weight is 0, even if the value is infinite or NaN."""
    product = values * weights
    return product if isfinite(np.add.reduce(product, axis=None)) else np.where(weights != 0, product, 0.0)


class TokenPenalty(Penalty):
    """A `Penalty` of an estimator whose term of a token reads that token's log-probs alone.

    The gradient of the summed terms is then each term's own derivative, and a cost in the reward is credited by plain
    sums over the rollout. The result is that of `Penalty`, up to rounding, in a fraction of the time.
    """

    def gradient(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray, *, log: bool) -> PenaltyGradient:
        """Return each token's weight in the gradient, and what is logged if `log`."""
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
        arguments: dict[str, Any] = {**self.loss.call.arguments, **own}
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
    faster = penalty.built_in and spec is not None and spec.per_token and takes <= FIELDS
    return TokenPenalty(runs) if faster else penalty
