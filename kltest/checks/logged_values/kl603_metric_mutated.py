"""KL603: the logged KL is changed after it was recorded.

A logged tensor may share memory with one that the loss changes in place later: `kl.detach()` does. The loss is called
twice on the same rollouts. The first call finds the step that made the logged tensor, the second watches that tensor
from there on. In-place steps that compute the metric are no defect. So a change counts only if the final metric is no
KL, and either was one before the change, or is a record, a detached alias, of another tensor that was changed.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from kltest.checks.check import Found
from kltest.checks.logged_values.metrics import batch, no_kl, number
from kltest.checks.logged_values.metrics import demonstrate as demonstrate_metrics
from kltest.counterexample.demonstration import Demonstration
from kltest.counterexample.environment import SmallEnvironment
from kltest.environments import Instance
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.identify.values import TOLERANCE, first_match, true_values
from kltest.loss.calling import Loss
from kltest.loss.stored_metrics import holds
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

# Functions that make an alias to be kept: nobody detaches a tensor in order to compute on under its first name.
RECORDS = frozenset({Tensor.detach, torch.detach, Tensor.numpy, Tensor.data.__get__})  # type: ignore[attr-defined]
# Modules of the frames between a step of the loss and the mode that watches it.
NOT_THE_LOSS = ("torch", "kltest.loss", "kltest.checks", "contextlib", "functools")


moot = no_kl


def examine(findings: Findings) -> Found | None:
    found = findings.once(mutation)
    return Found(found) if found else None


@dataclass(frozen=True)
class Change:
    """A step that changed the logged tensor: its line in the loss and the content before it.

    `by_name`: the step was made on the logged tensor itself, not on another one that shares its memory. `kept`: at that
    moment a mapping held the tensor under "kl", or a second name did.
    """

    line: str
    before: np.ndarray
    by_name: bool
    kept: bool


@dataclass(frozen=True)
class Trace:
    """Changes of the logged tensor in one call and its final content; `record`: it was made as a detached alias."""

    changes: tuple[Change, ...]
    final: np.ndarray
    record: bool


def mutation(findings: Findings) -> str:
    """Describe what changed the logged tensor after it was recorded; empty if it keeps its value."""
    instance = instances(findings.environments[-1], findings.seed)[0]
    # At β = 1 a multiplication in place would change nothing, and so would a ratio to the policy itself.
    beta = 2.0 if findings.loss.takes_beta else None
    rollout = batch(instance, findings.seed, "stale")
    return _after_the_call(findings, rollout, beta) or _within_the_call(findings, instance, rollout, beta)


def _after_the_call(findings: Findings, rollout: Rollout, beta: float | None) -> str:
    loss, first = findings.loss, rollout.replace()
    result = loss.returned(first, beta)
    if not isinstance(result.logged, Tensor | np.ndarray):
        return ""
    recorded = _content(result.logged)
    leaf_gradients(loss, result.loss.sum(), first)
    if not _equal(recorded, _content(result.logged)):
        return f"The backward pass changed it from {number(recorded)} to {number(_content(result.logged))}."
    later = loss.returned(rollout.take(list(reversed(range(len(rollout))))[:-1]), beta)
    # An attribute that always shows the newest value may be written over.
    newest = result.stored and later.logged is result.logged
    if not newest and not _equal(recorded, _content(result.logged)):
        return (
            f"A later call of the loss changed what the first one had logged, from {number(recorded)} to "
            f"{number(_content(result.logged))}."
        )
    return ""


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
        how = (
            "is a detached alias of a tensor that is changed in place" if recorded else "is changed in place after that"
        )
        at = f" at β = {beta:g}" if beta else ""
        return (
            f"What was recorded {how}: `{change.line}` turned {number(change.before)}, the mean over {len(rollout)} "
            f"rollouts{at}, into {number(trace.final)}."
        )
    return ""


def _was_a_kl(line: str, alone: list[Trace], instance: Instance) -> bool:
    before = [next((c.before for c in one.changes if c.line == line), one.final) for one in alone]
    return _is_a_kl(before, instance)


def _is_a_kl(contents: list[np.ndarray], instance: Instance) -> bool:
    """Return True if the metrics of the rollouts, in their order, are one of the KLs in expectation."""
    sums = np.array([float(content.sum()) for content in contents])
    weights = instance.rollout_weights("current")
    means = float(weights @ sums), float(weights @ (sums * instance.paths.lengths))
    truths = true_values(instance)
    limit = TOLERANCE
    return bool(first_match([means[0]], [truths], limit) or first_match([means[1]], [{"kl": truths["kl"]}], limit))


def _traced(loss: Loss, rollout: Rollout, beta: float | None) -> Trace | None:
    """Trace the logged tensor; None if there is none, or if no torch function made it."""
    # The first call builds the fields that it reads; the two calls that are compared must take the same steps.
    loss.returned(rollout.replace(), beta)
    made = _Made()
    with made:
        logged = loss.returned(rollout.replace(), beta).logged
    index = next((i for i, item in enumerate(made.items) if item is logged), None)
    if index is None or not isinstance(logged, Tensor | np.ndarray):
        return None
    watch = _Watch(index, rollout.peek("mask").numpy() != 0)
    with watch:
        again = loss.returned(rollout.replace(), beta).logged
    if again is not watch.item:
        return None
    return Trace(tuple(watch.changes), watch.content(), watch.record)


class _Made(TorchFunctionMode):
    """Collects everything that torch functions return, in order, and keeps it alive so that no identity is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.items += _arrays(made)
        return made


class _Watch(TorchFunctionMode):
    """Follows the `index`-th thing that torch functions return through all later steps.

    In numbers per token only `live` (B, T) positions count.
    """

    def __init__(self, index: int, live: np.ndarray) -> None:
        super().__init__()
        self.index, self.live = index, live
        self.item: Any = None
        self.record = False
        self.changes: list[Change] = []
        self._seen = 0
        self._last = np.zeros(0)

    def content(self) -> np.ndarray:
        found = _content(self.item)
        return np.where(self.live, found, 0.0) if found.shape == self.live.shape else found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.item is None:
            found = _arrays(made)
            if self.index < self._seen + len(found):
                self.item, self.record = found[self.index - self._seen], func in RECORDS
                self._last = self.content()
            self._seen += len(found)
        elif not _equal(self._last, now := self.content()):
            frame = _frame_of_the_loss(sys._getframe(1))
            by_name = any(part is self.item for part in (*args, *(kwargs or {}).values()))
            self.changes.append(Change(_line(frame), self._last, by_name, _keeps(frame, self.item)))
            self._last = now
        return made


def _arrays(made: Any) -> list[Any]:
    return [part for part in tree_iter(made) if isinstance(part, Tensor | np.ndarray)]


def _frame_of_the_loss(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__", "").startswith(NOT_THE_LOSS):
        frame = frame.f_back
    return frame


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return "a step"
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() or f"{frame.f_code.co_name}, a step"


def _keeps(frame: FrameType | None, item: Any) -> bool:
    """Return True if the loss holds this tensor under "kl" somewhere, or under two names."""
    for scope in _scopes(frame):
        if sum(value is item for value in scope.values()) > 1 or any(holds(value, item) for value in scope.values()):
            return True
    return False


def _scopes(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(NOT_THE_LOSS):
        yield dict(frame.f_locals)
        frame = frame.f_back


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


ENVIRONMENT = SmallEnvironment(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return demonstrate_metrics(ENVIRONMENT, {"as written": scales_in_place, "fixed": scales_a_copy}, beta=0.1)
