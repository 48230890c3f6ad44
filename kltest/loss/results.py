"""Read what a loss returned: a tensor of a known shape, alone or beside its metrics."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.loss.callables import kind_of
from kltest.loss.outcome import Returned
from kltest.rollout import Rollout

ACCEPTED = (
    "a scalar, (B,) or (B, T) tensor, a pair (loss, metrics) of one and a mapping, (loss, metric, metric, …) with "
    'metrics that have no gradient, or a dict, named tuple or dataclass with a "loss"'
)
_WHOLE = ("loss", "total_loss")
Names = Callable[[int], Sequence[str]]


@dataclass(frozen=True)
class Result:
    """A loss as returned, before placement; `metric` is the logged KL, a copy, float64; `note` is for the report.

    `logged` is that KL itself, as the loss left it.
    `beside` are tensors and numbers that it returned beside the loss, by name: the logged KL may be among them.
    """

    loss: Tensor
    returned: Returned
    metric: Tensor | None
    note: str | None = None
    logged: Any = None
    beside: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class _Parts:
    loss: Any
    metrics: Any = None
    note: str | None = None
    beside: tuple[tuple[str, Any], ...] = ()


def read(name: str, answer: Any, rollout: Rollout, *, names: Names, aux: bool) -> Result:
    """Return the loss and the logged KL in what `name` returned for a rollout; TargetError if it is anything else.

    `names` gives the names of so many items of a tuple without any. `aux`: that the second item of a pair has a
    gradient does not tell that it is a loss.
    """
    mask = rollout.peek("mask")
    shape = tuple(mask.shape)
    parts = _split(name, answer, shape, names, aux)
    loss, metrics = parts.loss, parts.metrics
    if not isinstance(loss, Tensor):
        _refuse(name, loss)
    if not loss.dtype.is_floating_point:
        raise TargetError(f"{name} returned a tensor of {loss.dtype}; a loss must be floating-point: {ACCEPTED}.")
    if loss.layout is not torch.strided or loss.is_meta:
        kind = "without numbers (device meta)" if loss.is_meta else f"of the layout {loss.layout}"
        raise TargetError(f"{name} returned a tensor {kind}; a loss must be a dense tensor of numbers: {ACCEPTED}.")
    # A loss may compute where it likes; what is done with it is done where its inputs came from.
    loss = loss.to(mask.device)
    returned = _kind(loss, shape)
    if returned is None:
        raise TargetError(
            f"{name} returned a tensor of shape {tuple(loss.shape)} for a batch of B = {shape[0]} rollouts of "
            f"T = {shape[1]} tokens; it must be (), {(shape[0],)} or {shape}. Reduce it, or keep one number a sequence "
            "or a token."
        )
    # A list of metrics, and metrics of other names, are ignored.
    logged = metrics.get("kl") if isinstance(metrics, Mapping) else None
    metric = None if logged is None else as_metric(logged, rollout)
    if logged is not None and metric is None:
        raise TargetError(
            f'{name} logged {kind_of(logged)} as metrics["kl"]; it must be a number or a tensor of shape (), '
            f"{(shape[0],)} or {shape}"
        )
    return Result(loss, returned, metric, parts.note, logged, beside=parts.beside)


def as_metric(logged: Any, rollout: Rollout) -> Tensor | None:
    """Return a copy as float64: what the loss logged may share memory with tensors that it uses again."""
    try:
        metric = torch.as_tensor(logged, dtype=torch.float64).detach().cpu().to_dense().clone()
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if _kind(metric, tuple(rollout.peek("mask").shape)) is None else metric


def check_finite(name: str, loss: Tensor, rollout: Rollout, fields: Mapping[str, str]) -> None:
    """Raise TargetError for a NaN or an infinity at a live position, naming the first one and what went into it."""
    live = torch.ones_like(loss, dtype=torch.bool) if loss.dim() < 2 else rollout.peek("mask") != 0
    bad = live & ~torch.isfinite(loss.detach())
    if not bad.any():
        return
    place = tuple(bad.nonzero()[0].tolist())
    words = "".join(f"{label} {index}" for label, index in zip((" at row", ", token"), place, strict=False))
    given = ", ".join(_given(name, rollout, place) for name in sorted(set(fields.values())))
    raise TargetError(
        f"{name} returned {loss.detach()[place].item()}{words} ({int(bad.sum())} of {int(live.sum())} values are not "
        f"finite){', where ' + given if place and given.strip(', ') else ''}. The inputs are finite and mild there: "
        "look for a logarithm of zero, a division by a count that can be zero, or an overflow."
    )


def _split(name: str, answer: Any, shape: tuple[int, ...], names: Names, aux: bool) -> _Parts:
    """Take an answer apart into the loss and what stands beside it."""
    entries = _entries(answer)
    if entries is not None and "loss" in entries:
        beside = [(str(key), item) for key, item in entries.items() if key != "loss"]
        metrics = next((item for _, item in beside if isinstance(item, Mapping) and "kl" in item), None)
        note = f"Of the {type(answer).__name__} that it returned ({', '.join(map(str, entries))}) its loss was taken"
        return _Parts(entries["loss"], metrics, note, tuple(beside))
    if not isinstance(answer, list | tuple):
        return _Parts(answer)
    if answer and isinstance(answer[0], Tensor):
        if len(answer) == 2 and (isinstance(answer[1], list | tuple) or _entries(answer[1]) is not None):
            return _Parts(answer[0], _entries(answer[1]))
        known = list(entries) if entries is not None else names(len(answer))
        if len(answer) == 2:
            one_loss = aux or _is_logged(answer[1], named=known[0] in _WHOLE and not known[1].endswith("loss"))
        else:
            one_loss = len(answer) > 2 and sum(_could_be_the_loss(item, shape) for item in answer) < 2
        if one_loss:
            labels = [label or type(item).__name__ for label, item in zip(known, answer, strict=True)]
            note = f"Of the {len(answer)} items that it returned ({', '.join(labels)}) the first was taken as the loss"
            metrics = next((item for item in answer if isinstance(item, Mapping)), None)
            return _Parts(answer[0], metrics, note, tuple(zip(labels, answer, strict=True))[1:])
    kinds = ", ".join(
        f"tensor of shape {tuple(i.shape)}" if isinstance(i, Tensor) else type(i).__name__ for i in answer
    )
    more = " Which of the two is the loss? Detach what is only logged, or name it." if len(answer) == 2 else ""
    raise TargetError(f"{name} returned a {type(answer).__name__} of ({kinds}); accepted are {ACCEPTED}.{more}")


def _entries(thing: Any) -> Mapping[Any, Any] | None:
    """Return the named parts of a mapping, a named tuple, a dataclass or an object with a `loss`; else None."""
    if isinstance(thing, Mapping):
        return thing
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return dict(zip(thing._fields, thing, strict=True))
    if is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: getattr(thing, field.name, None) for field in fields(thing)}
    held = getattr(thing, "__dict__", {})
    return held if "loss" in held and not isinstance(thing, Tensor) else None


def _is_logged(item: Any, *, named: bool) -> bool:
    """Return True for the second item of a pair that cannot be the loss, since it has no gradient or by the `named`."""
    if not isinstance(item, Tensor):
        return item is None or isinstance(item, float | np.floating)
    return not item.requires_grad or (named and item.dim() == 0)


def _could_be_the_loss(item: Any, shape: tuple[int, ...]) -> bool:
    """Return True if an item could be the loss as well; a scalar is one more metric."""
    return isinstance(item, Tensor) and item.requires_grad and tuple(item.shape) in (shape[:1], shape)


def _kind(tensor: Tensor, shape: tuple[int, ...]) -> Returned | None:
    kinds: dict[tuple[int, ...], Returned] = {(): "scalar", shape[:1]: "rows", shape: "tokens"}
    return kinds.get(tuple(tensor.shape))


def _given(name: str, rollout: Rollout, place: tuple[int, ...]) -> str:
    """Return the value of a (B, T) or (B,) field at a place, as text; empty for any other field."""
    field = rollout.built(name)
    if not isinstance(field, Tensor) or not 0 < field.dim() <= 2:
        return ""
    return f"{name} = {field.detach()[place[: field.dim()]].tolist()}"


def _refuse(name: str, answer: Any) -> None:
    what, why = kind_of(answer), ""
    if inspect.iscoroutine(answer):
        answer.close()
        why = "It is asynchronous: give kltest the synchronous function."
    elif answer is None:
        what, why = "nothing (None)", "Does it lack a return statement?"
    elif isinstance(answer, int | float | np.ndarray | np.generic):
        why = "The loss left torch (`.item()`, `float(…)`, NumPy), so there is nothing to differentiate."
    elif isinstance(answer, Mapping):
        why = f"Its keys are {', '.join(map(repr, list(answer)[:8]))}; return (loss, metrics), or the loss as 'loss'."
    raise TargetError(f"{name} returned {what}; accepted are {ACCEPTED}. {why}".strip())
