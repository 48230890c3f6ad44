"""The KL part: an estimator called on the rows of many runs, and its gradient at every row's log-probs.

Autograd runs through the estimator alone, from the log-probs of tokens; softmax and sums over rows are done by hand.
Rows of different runs share a call where the estimator keeps rows apart, or couples them through `group`; any other is
called once for each batch of each run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance
from kltest.errors import UsageError
from kltest.moments.differentiate import backward
from kltest.moments.reduction import BatchOfOneError, probe
from kltest.rollout import LEAVES, Rollout
from kltest.targets.placement import place
from kltest.targets.results import Result, read
from kltest.training.batch import Batch
from kltest.training.estimator import Held, is_ours, made_ready
from kltest.training.problems import PerRun, State
from kltest.training.world import World

PROBED = 12
"""Rollouts on which a stranger's function is tried, to see whether it couples the rows of a batch."""


@dataclass(frozen=True)
class Pull:
    """The gradient of the KL part: `logp` (R, M, T) at the sampled tokens and `logits` (R, M, T, V) at all next ones,
    weighted by the rows' weights, None where none arrives; `logged` (R,) the KL that the estimator logs.
    """

    logp: Tensor | None
    logits: Tensor | None
    logged: Tensor


class Penalty:
    """The estimator that the runs of a world share."""

    def __init__(self, world: World) -> None:
        run = world.runs[0]
        self.loss, self.world, self.whole = made_ready(run), world, run.whole
        self.own = [name for name, value in run.options.items() if isinstance(value, PerRun)]
        # Our own estimators are called directly; a stranger's function gets copies, in the types that it wants.
        self.trusted = is_ours(self.loss)
        self.couples = self.loss.spec.couples if self.trusted and self.loss.spec is not None else self._probed()
        self.alone = self.couples and not (self.trusted and "group" in self.loss.takes)

    def _probed(self) -> bool:
        """Whether the function was seen to couple rows, or returns one number for a batch."""
        if isinstance(self.loss.recipe.function, Held):
            self.loss.recipe.function.columns = {name: torch.tensor(0.5, dtype=torch.float64) for name in self.own}
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

    def pull(self, batch: Batch, policy: Tensor, sampler: Tensor) -> Pull:
        """The gradient of β times the KL part, or of the whole loss, on a batch; tables are (R, C, V) log-probs."""
        fields = self._fields(batch, policy, sampler)
        columns = self._columns(State(policy, self.world.log_reference, sampler), batch)
        found, logged = (self._one_by_one if self.alone else self._together)(fields, columns, batch)
        runs, rows, steps = batch.shape
        scale = 1.0 if self.whole or self.loss.takes_beta else self.world.beta
        if self.alone:
            scale = torch.as_tensor(scale).expand(runs, 1, 1)
        weights = (batch.weights if not self.alone else torch.ones_like(batch.weights)).unsqueeze(2) * scale
        weights = weights if batch.live is None else torch.where(batch.live, weights, 0.0)
        parts: dict[str, Tensor | None] = {}
        for leaf in LEAVES:
            part = found.get(leaf)
            if part is None:
                parts[leaf] = None
                continue
            part = part.view(runs, rows, steps, *part.shape[2:])
            by = weights if part.dim() == 3 else weights.unsqueeze(3)
            parts[leaf] = torch.where(by != 0, part * by, 0.0)
        return Pull(parts["logp"], parts["logits"], logged)

    def _together(
        self, fields: dict[str, Any], columns: dict[str, Tensor], batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor]:
        rollout = Rollout(fields, beta=float(self.world.runs[0].beta))
        objective, logged = self._call(rollout, columns)
        if objective.dim() == 0:
            raise UsageError(f"{self.loss.name} returned one number for a batch of several runs")
        each = logged if logged.dim() == 1 else torch.where(rollout.peek("mask") != 0, logged, 0.0).sum(dim=1)
        return self._gradients(rollout, objective.sum()), (each.view(batch.weights.shape) * batch.weights).sum(dim=1)

    def _one_by_one(
        self, fields: dict[str, Any], columns: dict[str, Tensor], batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Each batch, or in exact mode each group, as a call of its own."""
        runs, rows, _ = batch.shape
        size = (batch.group_size or 1) if batch.exact else rows
        base = Rollout(fields)
        if self.loss.takes & {"reward", "advantage", "rollout"}:
            self.loss.settle(base)
        found: dict[str, Tensor] = {}
        logged = torch.zeros(runs, dtype=torch.float64)
        for first in range(0, runs * rows, size):
            run = first // rows
            part = torch.arange(first, first + size)
            rollout = base.take(part, beta=float(self.world.runs[run].beta))
            objective, metric = self._call(rollout, {name: column[part] for name, column in columns.items()})
            weight = float(batch.weights[run, first % rows]) * size if batch.exact else 1.0
            if weight == 0:
                continue
            objective = objective if objective.dim() == 0 else objective.mean()
            for leaf, gradient in self._gradients(rollout, objective * weight).items():
                if leaf not in found:
                    found[leaf] = torch.zeros((runs * rows, *gradient.shape[1:]), dtype=torch.float64)
                found[leaf][part] = gradient
            if metric.dim() == 2:
                metric = torch.where(rollout.peek("mask") != 0, metric, 0.0).sum(dim=1)
            logged[run] += weight * metric.mean()
        return found, logged

    def _gradients(self, rollout: Rollout, objective: Tensor) -> dict[str, Tensor]:
        leaves = {name: leaf for name in LEAVES if (leaf := rollout.built(name)) is not None}
        if not leaves or not objective.requires_grad:
            return {}
        gradients = backward(self.loss, objective, list(leaves.values()))
        return {name: part for name, part in zip(leaves, gradients, strict=True) if part is not None}

    def _call(self, rollout: Rollout, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The placed loss, (B,) or a scalar, and what is logged, detached."""
        beta = rollout.peek("beta")
        result = self._returned(rollout, columns, beta)
        value = result.loss.to(torch.float64)
        if self.loss.takes_beta and not self.whole:
            value = value - self._returned(rollout, columns, 0.0).loss.to(torch.float64)
        logp = value if self.loss.placement == "loss" else rollout.peek("logp")
        placed = place(value, logp, rollout.peek("mask"), self.loss.placement, self.loss.credit)
        return placed, value.detach() if result.metric is None else result.metric

    def _returned(self, rollout: Rollout, columns: dict[str, Tensor], beta: float) -> Result:
        recipe = self.loss.recipe
        if isinstance(recipe.function, Held):
            recipe.function.columns = columns
        if not self.trusted:
            return self.loss.returned(rollout, beta)
        values: dict[str, Any] = {}
        for parameter in recipe.parameters:
            if parameter.name in self.loss.fields:
                name = self.loss.fields[parameter.name]
                values[parameter.name] = beta if name == "beta" else rollout.peek(name)
            elif parameter.name in self.loss.settings:
                values[parameter.name] = self.loss.settings[parameter.name]
        with torch.enable_grad():
            return read(self.loss.name, recipe.function(**values), rollout)

    def _columns(self, state: State, batch: Batch) -> dict[str, Tensor]:
        """(R·M, 1) the numbers of each run's own."""
        columns = {}
        for name in self.own:
            values = [run.options[name].value for run in self.world.runs]
            if callable(values[0]):
                column = torch.as_tensor(values[0](state), dtype=torch.float64)
            else:
                column = torch.tensor(values, dtype=torch.float64)
            columns[name] = column.repeat_interleave(batch.shape[1]).unsqueeze(1)
        return columns

    def _fields(self, batch: Batch, policy: Tensor, sampler: Tensor) -> dict[str, Any]:
        runs, rows, steps = batch.shape
        flat = (runs * rows, steps)
        tables = {"": policy, "ref_": self.world.log_reference, "old_": sampler}

        def reward() -> Tensor:
            return batch.along(batch.chosen(self.world.reward)).reshape(-1)

        def advantage() -> Tensor:
            earned = reward().view(runs, rows)
            return (earned - batch.mean(earned)).view(-1)

        def mask() -> Tensor:
            live = torch.ones(batch.shape[1:], dtype=torch.bool) if batch.live is None else batch.live
            return live.to(torch.float64).expand(batch.shape).reshape(flat)

        fields: dict[str, Any] = {
            "mask": mask,
            "tokens": lambda: (batch.cells % policy.shape[2]).expand(runs, rows * steps).reshape(flat),
            "reward": reward,
            "advantage": advantage,
            "group": lambda: batch.groups.reshape(-1),
        }
        for prefix, log_probs in tables.items():
            fields[f"{prefix}logp"] = partial(_rows, batch.chosen, log_probs, flat)
            fields[f"{prefix}logits"] = partial(_rows, batch.next_tokens, log_probs, (*flat, policy.shape[2]))
        return fields


def _rows(read_table: Callable[[Tensor], Tensor], table: Tensor, shape: tuple[int, ...]) -> Tensor:
    return read_table(table).reshape(shape)
