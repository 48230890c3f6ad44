"""KL603: the logged KL is changed after it was recorded.

A logged tensor may share memory with one that the loss changes in place later: `kl.detach()` does. The loss is called
twice on the same rollouts. The first call finds the step that made the logged tensor, the second watches that tensor
from there on. In-place steps that compute the metric are no defect. So a change counts only if the final metric is no
KL, and either was one before the change, or is a record, a detached alias, of another tensor that was changed.
"""

import linecache
import sys
from collections.abc import Mapping
from itertools import dropwhile, takewhile
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from kltest.checks.check import Found, shared
from kltest.checks.logged_values.metrics import batch, no_kl, number
from kltest.environments import Instance
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.identify.values import TOLERANCE, first_match, true_values
from kltest.loss.calling import Loss
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

# Functions that make an alias to be kept: nobody detaches a tensor in order to compute on under its first name.
RECORDS = frozenset({Tensor.detach, torch.detach, Tensor.numpy, Tensor.data.__get__})  # type: ignore[attr-defined]
# Modules of the frames between a step of the loss and the mode that watches it.
NOT_THE_LOSS = ("torch", "kltest.loss", "kltest.checks", "contextlib", "functools")

moot = no_kl


class Change(NamedTuple):
    """A step that changed the logged tensor: its line in the loss and the content before it.

    `by_name`: the step was made on the logged tensor itself, not on another one that shares its memory. `kept`: at that
    moment a mapping held the tensor under "kl", or a second name did.
    """

    line: str
    before: np.ndarray
    by_name: bool
    kept: bool


class Trace(NamedTuple):
    """Changes of the logged tensor in one call and its final content; `record`: it was made as a detached alias."""

    changes: list[Change]
    final: np.ndarray
    record: bool


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
    if not _equal(recorded, now := _content(result.logged)):
        return f"The backward pass changed it from {number(recorded)} to {number(now)}."
    loss.returned(rollout.take(list(reversed(range(len(rollout))))[:-1]), beta)
    if _equal(recorded, now := _content(result.logged)):
        return ""
    return f"A later call of the loss changed what the first one had logged, from {number(recorded)} to {number(now)}."


def _within_the_call(findings: Findings, instance: Instance, rollout: Rollout, beta: float | None) -> str:
    trace = _traced(findings.loss, rollout, beta)
    if trace is None or not trace.changes:
        return ""
    every = Rollout.of(instance, sampler="stale", padding=findings.seed)
    alone = [_traced(findings.loss, every.take([row]), beta) for row in range(len(every))]
    known = [one for one in alone if one is not None]
    if len(known) < len(alone) or _is_a_kl([one.final for one in known], instance):
        return ""
    for change in trace.changes:
        recorded = trace.record and not change.by_name
        if not recorded and ((change.by_name and not change.kept) or not _was_a_kl(change.line, known, instance)):
            continue
        how = "is a detached alias of a tensor that is" if recorded else "is"
        at = f" at β = {beta:g}" if beta else ""
        return (
            f"What was recorded {how} changed in place: `{change.line}` turned {number(change.before)}, the mean over "
            f"{len(rollout)} rollouts{at}, into {number(trace.final)}."
        )
    return ""


def _was_a_kl(line: str, alone: list[Trace], instance: Instance) -> bool:
    before = [next((c.before for c in one.changes if c.line == line), one.final) for one in alone]
    return _is_a_kl(before, instance)


def _is_a_kl(contents: list[np.ndarray], instance: Instance) -> bool:
    """Return True if the metrics of the rollouts, in their order, are one of the KLs in expectation."""
    sums = np.array([float(content.sum()) for content in contents])
    weights, truths = instance.rollout_weights("current"), true_values(instance)
    mean, of_tokens = float(weights @ sums), float(weights @ (sums * instance.paths.lengths))
    found = first_match([mean], [truths], TOLERANCE) or first_match([of_tokens], [{"kl": truths["kl"]}], TOLERANCE)
    return found is not None


def _traced(loss: Loss, rollout: Rollout, beta: float | None) -> Trace | None:
    """Trace the logged tensor; None if there is none, or if no torch function made it."""
    # The first call builds the fields that it reads; the two calls that are compared must take the same steps.
    loss.returned(rollout.replace(), beta)
    live = rollout.peek("mask").numpy() != 0
    with (made := _Watch(None, live)):
        logged = loss.returned(rollout.replace(), beta).logged
    index = next((i for i, item in enumerate(made.items) if item is logged), None)
    if index is None or not isinstance(logged, Tensor | np.ndarray):
        return None
    with (watch := _Watch(index, live)):
        again = loss.returned(rollout.replace(), beta).logged
    return Trace(watch.changes, watch.content(), watch.record) if again is watch.item else None


class _Watch(TorchFunctionMode):
    """Follows the `index`-th thing that torch functions return through all later steps; collects all if it is None.

    What it collects it keeps alive, so that no identity is reused. In numbers per token only `live` (B, T) positions
    count.
    """

    def __init__(self, index: int | None, live: np.ndarray) -> None:
        super().__init__()
        self.index, self.live = index, live
        self.items: list[Any] = []
        self.item: Any = None
        self.record = False
        self.changes: list[Change] = []
        self._last = np.zeros(0)

    def content(self) -> np.ndarray:
        found = _content(self.item)
        return np.where(self.live, found, 0.0) if found.shape == self.live.shape else found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.item is None:
            self.items += [part for part in tree_iter(made) if isinstance(part, Tensor | np.ndarray)]
            if self.index is not None and self.index < len(self.items):
                self.item, self.record = self.items[self.index], func in RECORDS
                self._last = self.content()
        elif not _equal(self._last, now := self.content()):
            frames = _frames_of_the_loss(sys._getframe(1))
            by_name = any(part is self.item for part in (*args, *(kwargs or {}).values()))
            self.changes.append(Change(_line(frames), self._last, by_name, _keeps(frames, self.item)))
            self._last = now
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


def _content(item: Any) -> np.ndarray:
    tensor = item.detach() if isinstance(item, Tensor) else torch.from_numpy(item)
    return tensor.to(torch.float64, copy=True).numpy()


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


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
