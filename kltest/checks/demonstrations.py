"""Demonstrations of pitfalls: exact numbers as a table, a column for the wrong loss and one for the corrected loss.

The list of checks is read without torch: it imports this module when a demonstration is run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.counterexample.environment import SmallEnvironment
from kltest.environments import Instance
from kltest.identify.parts import ascent
from kltest.loss.calling import Loss, bind
from kltest.loss.outcome import Call
from kltest.moments import exact, exact_batches
from kltest.moments.differentiate import LossExperiment, received
from kltest.report import align, format_cell
from kltest.rollout import Rollout
from kltest.truth import combine, parse, value

Losses = Mapping[str, Callable[..., Any]]
Words = Mapping[str, Any]
Cells = tuple[str | float, ...]


@dataclass(frozen=True)
class Demonstration:
    """Exact numbers of a pitfall: the setting in words, then a table whose cells are texts or numbers."""

    setting: str
    columns: Sequence[str]
    rows: Sequence[Cells]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table as text, numbers with six decimals, the head first."""
        return [tuple(self.columns), *(tuple(map(format_cell, row)) for row in self.rows)]

    def text(self) -> str:
        """Return the setting and the aligned table."""
        return "\n".join([self.setting, "", *align(self.cells())])


def demonstrate(losses: Losses, words: Words, options: Words) -> Demonstration:
    """Return the demonstration that a table of words.toml describes.

    Args:
        losses: The losses by the names of their columns.
        words: The fields of a SmallEnvironment, `shows`, which names one of KINDS (its gradients by default), and the
            arguments of that function; or the arguments of `of_calls`.
        options: The options with which the losses are graded.
    """
    if "rows" in words:
        return of_calls(losses, **words)
    of_environment = {entry.name for entry in fields(SmallEnvironment)}
    environment = SmallEnvironment(**{name: entry for name, entry in words.items() if name in of_environment})
    other = {name: entry for name, entry in words.items() if name not in {*of_environment, "shows"}}
    return KINDS[words.get("shows", "gradients")](losses, environment, options, **other)


def of_calls(losses: Losses, setting: str, rows: Sequence[Words], head: str = "") -> Demonstration:
    """The values that the losses return for a rollout, or for several, or their gradients.

    A row has a `name` and the tokens' probabilities `p` and `ref`, or their logarithms `logp` and `ref_logp`, perhaps a
    `mask`. It shows the value, or the gradient at the first rollout's token `gradient`, times its `share`: at its
    log-prob under the policy, or at the constant field `of`.
    """
    ready = [LossExperiment(bind(function, name=name)) for name, function in losses.items()]
    cells: list[Cells] = []
    for row in rows:
        logp, ref_logp = (
            one_row(row[log]) if log in row else one_row(row[p]).log()
            for p, log in (("p", "logp"), ("ref", "ref_logp"))
        )
        mask = one_row(row["mask"]) if "mask" in row else torch.ones_like(logp)
        rollout = Rollout({"logp": logp, "ref_logp": ref_logp, "old_logp": logp, "mask": mask})
        cells.append((row["name"], *(row.get("share", 1.0) * _shown(one, rollout, row) for one in ready)))
    return Demonstration(setting, (head, *losses), cells)


def _shown(experiment: LossExperiment, rollout: Rollout, row: Words) -> float:
    if "of" in row:
        found = received(experiment, rollout, [row["of"]])
    elif "gradient" in row:
        found = experiment.call(rollout).gradients
    else:
        return float(experiment.call(rollout).outcome.objective.detach())
    at = found.get(row.get("of", "logp"))
    return 0.0 if at is None else float(at[0, row["gradient"]])


def one_row(numbers: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """(1, T) float64, or (B, T) if there are several rows already."""
    return torch.tensor(numbers, dtype=torch.float64).reshape(-1, np.shape(numbers)[-1])


def _of_gradients(
    losses: Losses, environment: SmallEnvironment, options: Words, batch: int = 1, grouped: bool = False
) -> Demonstration:
    """The declared gradient and the expected gradients of the losses, context by context.

    With two actions the derivative is with respect to the probability of the first, otherwise with respect to each
    logit.
    """
    instance = environment.instance()
    sampler = "current" if environment.sampler is None else "stale"
    gradients = {"truth": combine(parse(options.get("expect", "reverse_kl")), instance)}
    for name, function in losses.items():
        loss = bind(function, Call(placement=options.get("placement")), name=name)
        loss = ascent(loss, options["part"], seed=0) if "part" in options else loss
        gradients[name] = _expected(loss, instance, sampler, batch, grouped)
    rows: list[Cells] = []
    for context, policy in enumerate(np.exp(instance.policy)):
        prefix, found = environment.prefix(context), np.array([gradient[context] for gradient in gradients.values()])
        if len(policy) == 2:
            rows.append((f"∂/∂p(0), {prefix}", *(found[:, 0] / policy.prod()).tolist()))  # ∂/∂θ(0) = p(0)·p(1)·∂/∂p(0)
        else:
            rows += [(f"∂/∂θ({action}), {prefix}", *part) for action, part in enumerate(found.T.tolist())]
    return Demonstration(environment.words(), ("derivative", *gradients), rows)


def _of_coefficients(
    losses: Losses, environment: SmallEnvironment, options: Words, betas: Sequence[float], note: str, batch: int = 1
) -> Demonstration:
    """β times the KL part of the expected gradient in a bandit of two actions, in groups of `batch` rollouts."""
    instance = environment.instance()
    scale = float(np.exp(instance.policy[0].sum()))  # ∂/∂θ(0) = p(0)·p(1)·∂/∂p(0)
    rows: list[Cells] = []
    for beta in betas:
        called = [bind(function, Call(beta=beta), name=name) for name, function in losses.items()]
        found = [_expected(loss, instance, "current", batch, grouped=True)[0, 0] for loss in called]
        rows.append((f"β = {beta:g}", *(float(beta * part / scale) for part in found)))
    return Demonstration(f"{environment.words()}\n{note}", ("coefficient", *losses), rows)


def _of_metrics(
    losses: Losses, environment: SmallEnvironment, options: Words, beta: float | None = None
) -> Demonstration:
    """Expectation and standard deviation of what the losses log, beside the KL."""
    instance = environment.instance()
    rows: list[Cells] = [("KL(π‖ref)", value("kl", instance), 0.0)]
    for name, function in losses.items():
        found = exact(bind(function, Call(beta=beta), name=name), instance).metric
        assert found is not None
        rows.append((name, found.mean, found.std))
    return Demonstration(environment.words(), ("logged", "expectation", "standard deviation"), rows)


def _expected(loss: Loss, instance: Instance, sampler: str, batch: int, grouped: bool) -> np.ndarray:
    if batch == 1:
        return exact(loss, instance, sampler).gradient
    return exact_batches(loss, instance, sampler, batch, grouped=grouped).gradient


KINDS: dict[str, Callable[..., Demonstration]] = {
    "gradients": _of_gradients,
    "coefficients": _of_coefficients,
    "metrics": _of_metrics,
}
