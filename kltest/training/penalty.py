"""The KL part: an estimator called on the rows of many runs, and its gradient at every row's log-probs.

Autograd runs through the estimator alone, from the log-probs of tokens; softmax and sums over rows are done by hand.
Rows of different runs share a call where the estimator keeps rows apart, or couples them through `group`; any other is
called once for each batch of each run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.loss.placement import place
from kltest.moments.differentiate import backward
from kltest.moments.reduction import BatchOfOneError, probe
from kltest.rollout import LEAVES, Rollout
from kltest.training.batch import Batch
from kltest.training.estimator import Held, is_ours, made_ready
from kltest.training.problems import PerRun, State
from kltest.training.sums import by_run, total
from kltest.training.world import World

PROBED = 12
"""Rollouts on which a stranger's function is tried, to see whether it couples the rows of a batch."""


@dataclass(frozen=True)
class Pull:
    """The gradient of the KL part: `logp` (T, M, R) at the sampled tokens and `logits` (M·R, T, V) at all next ones,
    weighted by the rows' weights, None where none arrives; `logged` (R,) the KL that the estimator logs, if asked.
    """

    logp: np.ndarray | None = None
    logits: np.ndarray | None = None
    logged: np.ndarray | None = None


class Penalty:
    """The estimator that the runs of a world share."""

    def __init__(self, world: World) -> None:
        run = world.runs[0]
        self.loss, self.world, self.whole = made_ready(run), world, run.whole
        self.own = [name for name, value in run.options.items() if isinstance(value, PerRun)]
        self._ones: Tensor | None = None
        # Our own estimators are called directly; a stranger's function gets copies, in the types that it wants.
        self.trusted = is_ours(self.loss)
        self.couples = self.loss.spec.couples if self.trusted and self.loss.spec is not None else self._probed()
        self.alone = self.couples and not (self.trusted and "group" in self.loss.takes)

    def _probed(self) -> bool:
        """Whether the function was seen to couple rows, or returns one number for a batch."""
        if isinstance(self.loss.function, Held):
            self.loss.function.columns = {name: torch.tensor(0.5, dtype=torch.float64) for name in self.own}
        instance = Instance.draw(self.world.environment, 0)
        generator = np.random.default_rng(0)
        paths = instance.environment.sample(instance.policy, PROBED, generator)
        pool = Rollout.of(instance, paths)
        try:
            witness = probe(self.loss, pool, generator, few=True)
        except BatchOfOneError:
            return True
        return witness.reduction != "per-row" or any(
            single.outcome.metric is not None and single.outcome.metric.dim() == 0
            for single in witness.singles.values()
        )

    def pull(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray, *, log: bool) -> Pull:
        """The gradient of β times the KL part, or of the whole loss, on a batch; tables of log-probs are (V, C, R)."""
        fields, columns = self._fields(batch, policy, sampler), self._columns(batch, policy, sampler)
        call = self._one_by_one if self.alone else self._together
        found, logged = call(fields, columns, batch, log)
        shares = np.ones_like(batch.weights) if self.alone else batch.weights
        if not (self.whole or self.loss.takes_beta):
            shares = shares * self.world.beta
        weights = np.broadcast_to(shares, batch.shape)
        weights = weights if batch.live is None else np.where(batch.live, weights, 0.0)
        parts: dict[str, np.ndarray | None] = dict.fromkeys(LEAVES)
        for leaf, part in found.items():
            if part.dim() == 2:
                parts[leaf] = weighted(batch.steps(part.numpy()), weights)
            else:
                parts[leaf] = weighted(part.numpy(), batch.rows(weights)[:, :, None])
        return Pull(parts["logp"], parts["logits"], logged)

    def _together(
        self, fields: dict[str, Any], columns: dict[str, Tensor], batch: Batch, log: bool
    ) -> tuple[dict[str, Tensor], np.ndarray | None]:
        """One call for the rows of all runs."""
        rollout = Rollout(fields, beta=float(self.world.runs[0].beta))
        objective, logged = self._call(rollout, columns, placed=batch.live is not None)
        gradients = self._gradients(rollout, objective.sum())
        if not log:
            return gradients, None
        values = logged.numpy()
        each = batch.along(batch.steps(values)) if values.ndim == 2 else values.reshape(batch.shape[1:])
        return gradients, total(weighted(each, batch.weights))

    def _one_by_one(
        self, fields: dict[str, Any], columns: dict[str, Tensor], batch: Batch, log: bool
    ) -> tuple[dict[str, Tensor], np.ndarray | None]:
        """Each batch, or in exact mode each group, as a call of its own."""
        _, rows, runs = batch.shape
        size = (batch.group_size or 1) if batch.exact else rows
        base = Rollout(fields)
        if not self.trusted:
            self.loss.settle(base)
        found: dict[str, Tensor] = {}
        logged = np.zeros(runs)
        for run, first in product(range(runs), range(0, rows, size)):
            weight = float(batch.weights[first, run]) * size if batch.exact else 1.0
            if weight == 0:
                continue
            part = torch.arange(first, first + size) * runs + run
            rollout = base.take(part, beta=float(self.world.runs[run].beta))
            objective, metric = self._call(rollout, {name: column[part] for name, column in columns.items()})
            objective = objective if objective.dim() == 0 else objective.mean()
            for leaf, gradient in self._gradients(rollout, objective * weight).items():
                if leaf not in found:
                    found[leaf] = torch.zeros((rows * runs, *gradient.shape[1:]), dtype=torch.float64)
                found[leaf][part] = gradient
            if metric.dim() == 2:
                metric = torch.where(rollout.peek("mask") != 0, metric, 0.0).sum(dim=1)
            logged[run] += weight * float(metric.mean())
        return found, logged if log else None

    def _gradients(self, rollout: Rollout, objective: Tensor) -> dict[str, Tensor]:
        leaves = {name: leaf for name in LEAVES if (leaf := rollout.built(name)) is not None}
        if not leaves or not objective.requires_grad:
            return {}
        gradients = backward(self.loss, objective, list(leaves.values()))
        return {name: part for name, part in zip(leaves, gradients, strict=True) if part is not None}

    def _call(self, rollout: Rollout, columns: dict[str, Tensor], *, placed: bool = True) -> tuple[Tensor, Tensor]:
        """The placed loss, (B,) or a scalar, and what is logged, detached.

        Without `placed` a loss of tokens may be left as it is: where all are live, its sum is the same.
        """
        beta = rollout.peek("beta")
        value, metric = self._returned(rollout, columns, beta)
        if self.loss.takes_beta and not self.whole:
            value = value - self._returned(rollout, columns, 0.0)[0]
        logged = value.detach() if metric is None else metric
        if self.loss.placement == "loss" and not placed:
            return value, logged
        logp = value if self.loss.placement == "loss" else rollout.peek("logp")
        return place(value, logp, rollout.peek("mask"), self.loss.placement, self.loss.credit), logged

    def _returned(self, rollout: Rollout, columns: dict[str, Tensor], beta: float) -> tuple[Tensor, Tensor | None]:
        """What the estimator returns, float64, and the KL that it logs beside that."""
        if isinstance(self.loss.function, Held):
            self.loss.function.columns = columns
        if not self.trusted:
            result = self.loss.returned(rollout, beta)
            return result.loss.to(torch.float64), result.metric
        values: dict[str, Any] = {}
        for parameter in self.loss.parameters:
            if parameter.name in self.loss.fields:
                name = self.loss.fields[parameter.name]
                values[parameter.name] = beta if name == "beta" else rollout.peek(name)
            elif parameter.name in self.loss.settings:
                values[parameter.name] = self.loss.settings[parameter.name]
        with torch.enable_grad():
            answer = self.loss.function(**values)
        return (answer[0], answer[1]["kl"]) if isinstance(answer, tuple) else (answer, None)

    def _columns(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray) -> dict[str, Tensor]:
        """(M·R, 1) the numbers of each run's own, by parameter."""
        columns = {}
        for name in self.own:
            values = [run.options[name].value for run in self.world.runs]
            if callable(values[0]):
                tables = (policy, self.world.log_reference, sampler)
                state = State(*(torch.from_numpy(by_run(table)) for table in tables))
                column = torch.as_tensor(values[0](state), dtype=torch.float64)
            else:
                column = torch.tensor(values, dtype=torch.float64)
            columns[name] = column.repeat(batch.shape[1]).unsqueeze(1)
        return columns

    def _fields(self, batch: Batch, policy: np.ndarray, sampler: np.ndarray) -> dict[str, Any]:
        """Everything that a rollout has, (M·R, …), built when it is asked for."""
        steps, rows, runs = batch.shape
        flat = (rows * runs, steps)
        world = self.world

        def reward() -> np.ndarray:
            return batch.along(batch.chosen(world.reward))

        def advantage() -> Tensor:
            earned = reward()
            return torch.from_numpy((earned - batch.mean(earned)).reshape(-1))

        def mask() -> Tensor:
            assert batch.live is not None
            return torch.from_numpy(batch.rows(batch.live).astype(float))

        fields: dict[str, Any] = {
            "mask": mask if batch.live is not None else self._all_live(flat),
            "tokens": lambda: torch.from_numpy(batch.rows(batch.cells.reshape(batch.shape)) // policy[0].size),
            "reward": lambda: torch.from_numpy(reward().reshape(-1)),
            "advantage": advantage,
            "group": lambda: torch.from_numpy(batch.groups.reshape(-1)),
        }
        for prefix, table in {"": policy, "ref_": world.log_reference, "old_": sampler}.items():
            fields[f"{prefix}logp"] = lambda table=table: torch.from_numpy(batch.rows(batch.chosen(table)))
            fields[f"{prefix}logits"] = lambda table=table: torch.from_numpy(batch.next_tokens(table))
        return fields

    def _all_live(self, shape: tuple[int, int]) -> Tensor:
        """A mask of ones, kept for the next update unless a stranger may write into it."""
        if not self.trusted or self._ones is None or self._ones.shape != shape:
            self._ones = torch.ones(shape, dtype=torch.float64)
        return self._ones


def weighted(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Their product, without what a row that was never drawn, or that counts for nothing, would add, however steep."""
    product = values * weights
    return product if isfinite(np.add.reduce(product, axis=None)) else np.where(weights != 0, product, 0.0)
