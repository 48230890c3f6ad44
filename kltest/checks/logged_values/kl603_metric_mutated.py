"""KL603: the logged KL is changed after it was recorded.

A logged tensor may share memory with one that the loss changes in place later: `kl.detach()` does. The content of that
memory before each step in place is compared with the final metric: the metric is changed if it is no KL, and was one
before a step. A step on the logged tensor itself may compute the metric: it counts if a dictionary held it as "kl".
"""

from contextlib import suppress
from traceback import walk_stack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.checks.check import Found
from kltest.checks.logged_values.metrics import batch, no_kl, number
from kltest.environments import Instance
from kltest.identify.findings import Findings, shared
from kltest.identify.instances import instances
from kltest.identify.values import TOLERANCE, first_match, true_values
from kltest.loss.calling import Loss
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

moot = no_kl


@shared
def examine(findings: Findings) -> Found | None:
    """Report what changed the logged tensor after it was recorded."""
    instance = instances(findings.environments[-1], findings.seed)[0]
    # At β = 1 a multiplication in place would change nothing, and so would a ratio to the policy itself.
    beta = 2.0 if findings.loss.takes_beta else None
    rollout = batch(instance, findings.seed, "stale")
    words = _after_the_call(findings, rollout, beta) or _within_the_call(findings, instance, rollout, beta)
    return Found(words) if words else None


def _after_the_call(findings: Findings, rollout: Rollout, beta: float | None) -> str:
    loss, first = findings.loss, rollout.replace()
    result = loss.returned(first, beta)
    if not isinstance(result.logged, Tensor | np.ndarray):
        return ""
    recorded = _content(result.logged)
    leaf_gradients(loss, result.loss.sum(), first)
    loss.returned(rollout.take(list(reversed(range(len(rollout))))[:-1]), beta)
    now = _content(result.logged)
    if np.array_equal(recorded, now, equal_nan=True):
        return ""
    return f"The backward pass, or a later call of the loss, changed it from {number(recorded)} to {number(now)}."


def _within_the_call(findings: Findings, instance: Instance, rollout: Rollout, beta: float | None) -> str:
    final, steps = changes(findings.loss, rollout, beta)
    if not steps:
        return ""
    every = Rollout.of(instance, sampler="stale", padding=findings.seed)
    alone = [changes(findings.loss, every.take([row]), beta) for row in range(len(every))]
    if _is_a_kl([last for last, _ in alone], instance):
        return ""
    for place, before in enumerate(steps):
        if all(place < len(mine) for _, mine in alone) and _is_a_kl([mine[place] for _, mine in alone], instance):
            at = f" at β = {beta:g}" if beta else ""
            return (
                f"What was recorded is changed in place: a step turned {number(before)}, the mean over "
                f"{len(rollout)} rollouts{at}, into {number(final)}."
            )
    return ""


def _is_a_kl(contents: list[np.ndarray], instance: Instance) -> bool:
    """Return True if the metrics of the rollouts, in their order, are one of the KLs in expectation."""
    sums = np.array([float(content.sum()) for content in contents])
    weights, truths = instance.rollout_weights("current"), true_values(instance)
    mean, of_tokens = float(weights @ sums), float(weights @ (sums * instance.paths.lengths))
    found = first_match([mean], [truths], TOLERANCE) or first_match([of_tokens], [{"kl": truths["kl"]}], TOLERANCE)
    return found is not None


def changes(loss: Loss, rollout: Rollout, beta: float | None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Call the loss; return the metric, and what it was before each step in place, per token only at live positions."""
    live = rollout.peek("mask").numpy() != 0
    with (writes := _Writes()):
        logged = loss.returned(rollout.replace(), beta).logged
    if not isinstance(logged, Tensor | np.ndarray):
        return np.zeros(0), []
    final, memory = _content(logged), _memory(logged)
    before = [
        was
        for tensor, was, recorded in writes.steps
        if _memory(tensor) == memory and was.size == final.size and (recorded or tensor is not logged)
    ]
    shown = [np.where(live, one, 0.0) if one.shape == live.shape else one for one in (final, *before)]
    return shown[0], shown[1:]


class _Writes(TorchFunctionMode):
    """Mode that stores each tensor that is changed in place, its content before, and if a dictionary held it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Tensor, np.ndarray, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: list[tuple[Tensor, int, np.ndarray]] = []
        for part in (*args, *(kwargs or {}).values()):
            if isinstance(part, Tensor):
                with suppress(RuntimeError, TypeError):  # sparse ones, those that vmap maps over, inference tensors
                    given.append((part, part._version, _content(part)))
        made = func(*args, **(kwargs or {}))
        self.steps += [(part, was, _recorded(part)) for part, version, was in given if part._version != version]
        return made


def _recorded(item: Tensor) -> bool:
    """Return True if a function that is running holds this tensor under "kl" in a dictionary."""
    held = (value for frame, _ in walk_stack(None) for value in frame.f_locals.values() if isinstance(value, dict))
    return any(value.get("kl") is item for value in held)


def _content(item: Tensor | np.ndarray) -> np.ndarray:
    tensor = item.detach() if isinstance(item, Tensor) else torch.from_numpy(item)
    return tensor.to(torch.float64, copy=True).numpy()


def _memory(item: Tensor | np.ndarray) -> int:
    """Address of the memory in which the numbers stand."""
    tensor = item if isinstance(item, Tensor) else torch.from_numpy(item)
    return tensor.untyped_storage().data_ptr()


def scales_in_place(logp, ref_logp, mask, beta):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    metrics = {"kl": cost.detach()}
    cost *= beta
    return cost * logp.where(mask != 0, 0.0).sum(-1), metrics


def scales_a_copy(logp, ref_logp, mask, beta):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    metrics = {"kl": cost.clone()}
    cost *= beta
    return cost * logp.where(mask != 0, 0.0).sum(-1), metrics
