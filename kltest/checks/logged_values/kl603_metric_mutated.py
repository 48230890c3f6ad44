"""KL603: the logged KL is changed after it was recorded.

A logged tensor may share memory with one that the loss changes in place later: `kl.detach()` does. All steps in place
are noted, with the content before each. Those that compute the metric are no defect. So a step counts only if the final
metric is no KL and was one before the step, and if the step was made on another tensor that shares its memory, or while
the logged one was kept under "kl" or under a second name.
"""

import linecache
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import dropwhile, takewhile
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kltest.checks.check import Found, shared
from kltest.checks.logged_values.metrics import batch, no_kl, number
from kltest.environments import Instance
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.identify.values import TOLERANCE, first_match, true_values
from kltest.loss.calling import Loss
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

# Modules of the frames between a step of the loss and the mode that notes it.
NOT_THE_LOSS = ("torch", "kltest.loss", "kltest.checks", "contextlib", "functools")

moot = no_kl


class Step(NamedTuple):
    """A step in place: its line in the loss, the tensor, its content before; `kept`: a mapping held it under "kl"."""

    line: str
    tensor: Tensor
    before: np.ndarray
    kept: bool


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
    if not np.array_equal(recorded, now := _content(result.logged), equal_nan=True):
        return f"The backward pass changed it from {number(recorded)} to {number(now)}."
    loss.returned(rollout.take(list(reversed(range(len(rollout))))[:-1]), beta)
    if np.array_equal(recorded, now := _content(result.logged), equal_nan=True):
        return ""
    return f"A later call of the loss changed what the first one had logged, from {number(recorded)} to {number(now)}."


def _within_the_call(findings: Findings, instance: Instance, rollout: Rollout, beta: float | None) -> str:
    final, steps = changes(findings.loss, rollout, beta)
    if not steps:
        return ""
    every = Rollout.of(instance, sampler="stale", padding=findings.seed)
    alone = [changes(findings.loss, every.take([row]), beta) for row in range(len(every))]
    if _is_a_kl([last for last, _ in alone], instance):
        return ""
    for step in steps:
        # A rollout that is not changed there keeps what it had.
        before = [next((one.before for one in mine if one.line == step.line), last) for last, mine in alone]
        if _is_a_kl(before, instance):
            at = f" at β = {beta:g}" if beta else ""
            return (
                f"What was recorded is changed in place: `{step.line}` turned {number(step.before)}, the mean over "
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


def changes(loss: Loss, rollout: Rollout, beta: float | None) -> tuple[np.ndarray, list[Step]]:
    """Call the loss; return the metric and the steps that changed it, in numbers per token only at live positions."""
    live = rollout.peek("mask").numpy() != 0
    with (noted := _InPlace()):
        logged = loss.returned(rollout.replace(), beta).logged
    if not isinstance(logged, Tensor | np.ndarray):
        return np.zeros(0), []

    def shown(content: np.ndarray) -> np.ndarray:
        return np.where(live, content, 0.0) if content.shape == live.shape else content

    final, memory = _content(logged), _memory(logged)
    steps = [
        step._replace(before=shown(step.before))
        for step in noted.steps
        if _memory(step.tensor) == memory and step.before.size == final.size
        if step.tensor is not logged or step.kept
    ]
    return shown(final), steps


class _InPlace(TorchFunctionMode):
    """Mode that notes every step which changes a tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before: list[tuple[Tensor, np.ndarray]] = []
        for part in (*args, *(kwargs or {}).values()):
            if isinstance(part, Tensor):
                with suppress(RuntimeError, TypeError):  # sparse ones, and those that vmap maps over
                    before.append((part, _content(part)))
        made = func(*args, **(kwargs or {}))
        for part, was in before:
            if not np.array_equal(was, _content(part), equal_nan=True):
                frames = _frames_of_the_loss(sys._getframe(1))
                self.steps.append(Step(_line(frames), part, was, _keeps(frames, part)))
        return made


def _frames_of_the_loss(step: FrameType) -> list[FrameType]:
    """Frames between a step of the loss and the code that calls it, the innermost first."""

    def foreign(frame: FrameType) -> bool:
        return frame.f_globals.get("__name__", "").startswith(NOT_THE_LOSS)

    inside = dropwhile(foreign, (frame for frame, _ in walk_stack(step)))
    return list(takewhile(lambda frame: not foreign(frame), inside))


def _line(frames: list[FrameType]) -> str:
    if not frames:
        return "a step"
    code, line = frames[0].f_code, frames[0].f_lineno
    return linecache.getline(code.co_filename, line).strip() or f"{code.co_name}, a step"


def _keeps(frames: list[FrameType], item: Any) -> bool:
    """Return True if the loss holds this tensor under "kl" in a mapping, or under two names."""
    scopes = [list(frame.f_locals.values()) for frame in frames]
    twice = any(sum(value is item for value in scope) > 1 for scope in scopes)
    return twice or any(isinstance(value, Mapping) and value.get("kl") is item for scope in scopes for value in scope)


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
