"""Experiments on whether a logged KL keeps the value that it was recorded with.

A tensor that is logged may share memory with one that the loss goes on to change in place: `kl.detach()` does. The loss
is called twice on the same rollouts. The first call tells which of its steps made the tensor that is logged, the second
watches that tensor from there on. In-place steps that compute what is logged are no defect, so a change counts only
where what is logged in the end is no KL, and either was one before the change, or is a record, a detached alias, of
another tensor that was changed.
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

from kltest.checks.logged_values.logged import batch
from kltest.environments import Instance
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.identify.values import TOLERANCE, first_match, true_values
from kltest.loss.outcome import Loss
from kltest.loss.stored_metrics import holds
from kltest.rollout import LEAVES, Rollout

# Aliases that are made to be kept: nobody detaches a tensor in order to go on computing it under its first name.
RECORDS = frozenset({Tensor.detach, torch.detach, Tensor.numpy, Tensor.data.__get__})  # type: ignore[attr-defined]
# Frames between a step of the loss and the mode that watches it.
NOT_THE_LOSS = ("torch", "kltest.loss", "kltest.checks", "contextlib", "functools")


@dataclass(frozen=True)
class Change:
    """A step that changed the logged tensor: its line in the loss and the content before it.

    `by_name`: the step was made on the logged tensor itself and not on another one that shares its memory. `kept`: at
    that moment something held the tensor already, a mapping under "kl" or a second name.
    """

    line: str
    before: np.ndarray
    by_name: bool
    kept: bool


@dataclass(frozen=True)
class Trace:
    """What became of the logged tensor in one call; `record`: it was made as a detached alias."""

    changes: tuple[Change, ...]
    final: np.ndarray
    record: bool


def mutation(findings: Findings) -> str:
    """A sentence saying what changed the logged tensor after it was recorded; nothing where it keeps its value."""
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
    leaves = [leaf for name in LEAVES if (leaf := first.built(name)) is not None]
    if result.loss.requires_grad and leaves:
        torch.autograd.grad(result.loss.sum(), leaves, allow_unused=True)
    if not _equal(recorded, _content(result.logged)):
        return f"The backward pass changed it from {_shown(recorded)} to {_shown(_content(result.logged))}."
    later = loss.returned(rollout.take(list(reversed(range(len(rollout))))[:-1]), beta)
    # A place on an object that always shows the newest value may be written over.
    newest = result.stored and later.logged is result.logged
    if not newest and not _equal(recorded, _content(result.logged)):
        return (
            f"A later call of the loss changed what the first one had logged, from {_shown(recorded)} to "
            f"{_shown(_content(result.logged))}."
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
            f"What was recorded {how}: `{change.line}` turned {_shown(change.before)}, the mean over {len(rollout)} "
            f"rollouts{at}, into {_shown(trace.final)}."
        )
    return ""


def _was_a_kl(line: str, alone: list[Trace], instance: Instance) -> bool:
    before = [next((c.before for c in one.changes if c.line == line), one.final) for one in alone]
    return _is_a_kl(before, instance)


def _is_a_kl(contents: list[np.ndarray], instance: Instance) -> bool:
    """Whether what is logged for each rollout, in their order, is one of the KLs in expectation under the policy."""
    sums = np.array([float(content.sum()) for content in contents])
    weights = instance.rollout_weights("current")
    means = float(weights @ sums), float(weights @ (sums * instance.paths.lengths))
    truths = true_values(instance)
    limit = TOLERANCE
    return bool(first_match([means[0]], [truths], limit) or first_match([means[1]], [{"kl": truths["kl"]}], limit))


# ------------------------------------------------------------------------------------------- watching


def _traced(loss: Loss, rollout: Rollout, beta: float | None) -> Trace | None:
    """What became of the logged tensor, None where it is none or where its making was not seen."""
    # Fields are built by the first call that reads them; the two that are compared must take the same steps.
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
    """Collects everything that torch functions return, in order; kept alive, so that nothing is taken for another."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.items += _arrays(made)
        return made


class _Watch(TorchFunctionMode):
    """Follows the `index`-th thing that torch functions return through all later steps;

    Of a number a token only `live` (B, T) positions count.
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
    """Whether the loss holds this thing under "kl" somewhere, or under two names of its own."""
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


def _shown(content: np.ndarray) -> str:
    """A metric of several rollouts as one number, as a log would show it."""
    rows = content.sum(axis=1) if content.ndim == 2 else content
    return f"{float(rows.mean()):.4g}"
