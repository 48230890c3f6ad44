"""Read what a loss returned: a tensor of a known shape, alone or beside what it logs, the KL perhaps among that."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.loss.callables import kind_of
from kltest.loss.global_state import preserved
from kltest.loss.jax.bridge import JaxLoss
from kltest.loss.outcome import Returned
from kltest.loss.returned_names import returned_names
from kltest.loss.view import RolloutView
from kltest.names import quantity, says_kl
from kltest.rollout import Rollout, elsewhere, is_mapped

ACCEPTED = (
    "a scalar, (B,) or (B, T) tensor, a pair (loss, metrics) of one and a mapping, (loss, metric, metric, …) with "
    'metrics that have no gradient, or a dict, named tuple or dataclass with a "loss"'
)
METRICS = "metrics"
PAIR = "Of the pair that it returned the first was taken as the loss"
OF_METRICS = "and the kl of its metrics as the logged KL"
NO_KL = "and the rest was ignored: nothing there says by its name that it is a KL"
_WHOLE = ("loss", "total_loss")
Call = Callable[[RolloutView], Any]


@dataclass(frozen=True)
class Result:
    """A loss as returned, before placement; `metric` is the logged KL, a copy, float64; `note` is for the report.

    `logged` is that KL itself, as the loss left it; `beside` all that stands beside the loss, by name.
    """

    loss: Tensor
    returned: Returned
    metric: Tensor | None = None
    logged: Any = None
    note: str | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)


class _Parts(NamedTuple):
    """A returned value taken apart: the loss, the others by name, and a note if it was not plain which is which."""

    loss: Any
    beside: Sequence[tuple[str, Any]] = ()
    note: str | None = None


class Reader:
    """Reads the answers of one callable, and decides once what beside its loss is the logged KL."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names: dict[int, Sequence[str]] = {}
        self._moves: dict[str, bool] = {}
        self._note: str | None = None

    def read(self, name: str, answer: Any, rollout: Rollout, view: RolloutView, call: Call) -> Result:
        """Return the loss and the logged KL in what `name` returned for a rollout.

        `view` is what the loss was given of the rollout; `call` calls it once more, to see what moves with the
        reference.

        Raises:
            TargetError: There is no loss in it, or it logged something else as its KL.
        """
        loss, beside, note = self._parts(name, answer, rollout)
        loss, returned = _checked(name, loss, rollout)
        logged, words = self._logged(name, beside, rollout, view, call)
        metric = None if logged is None else as_metric(logged, rollout)
        # A pair with metrics that has no KL among them, or the one called so, needs no words.
        if note is not None and not (note == PAIR and words in (NO_KL, OF_METRICS)):
            # That of the first call stays: at β = 0 a KL may be missing.
            self._note = self._note or f"{note} {words}."
        return Result(loss, returned, metric, logged, self._note, dict(_labelled(beside)))

    def _logged(
        self, name: str, beside: Sequence[tuple[str, Any]], rollout: Rollout, view: RolloutView, call: Call
    ) -> tuple[Any, str]:
        """Return the logged KL, None if there is none, with words for it: the "kl" of a mapping, or what says so.

        Of several that say so, and move with the reference, the one whose name is just `kl` is read, else the first.
        """
        kls = (item["kl"] for _, item in beside if isinstance(item, Mapping) and item.get("kl") is not None)
        if (logged := next(kls, None)) is not None:
            if as_metric(logged, rollout) is None:
                rows, tokens = rollout.peek("mask").shape
                raise TargetError(
                    f'{name} logged {kind_of(logged)} as metrics["kl"]; it must be a number or a tensor of shape (), '
                    f"{(rows,)} or {(rows, tokens)}"
                )
            return logged, OF_METRICS
        moving: list[tuple[str, Any]] = []
        still: list[str] = []
        for label, item in sorted(_labelled(beside), key=lambda pair: quantity(pair[0]) != "kl"):
            if not says_kl(quantity(label)) or (metric := as_metric(item, rollout)) is None:
                continue
            if label not in self._moves:
                self._moves[label] = self._differs(label, metric, rollout, view, call)
            if self._moves[label]:
                moving.append((label, item))
            else:
                still.append(label)
        others = " and ".join(label for label, _ in moving[1:])
        if moving:
            return moving[0][1], f"and {moving[0][0]} as the logged KL" + (f", not {others}" if others else "")
        if still:
            return None, f"and the rest was ignored: {' and '.join(still)} does not move with ref_logp"
        return None, NO_KL

    def _differs(self, label: str, metric: Tensor, rollout: Rollout, view: RolloutView, call: Call) -> bool:
        fields = {name: lambda name=name: elsewhere(rollout.peek(name)) for name in ("ref_logp", "ref_logits")}
        moved = view.over(rollout.replace(**{name: field for name, field in fields.items() if name in rollout}))
        try:
            with preserved():
                found = dict(_labelled(self._parts("", call(moved), moved).beside)).get(label)
                other = as_metric(found, moved)
        except Exception:  # it may refuse such a reference, and then nothing is known
            return False
        return other is not None and not torch.allclose(other, metric, rtol=1e-9, atol=1e-12, equal_nan=True)

    def _parts(self, name: str, answer: Any, rollout: Rollout) -> _Parts:
        """Take an answer apart into the loss and what stands beside it."""
        entries = _entries(answer)
        if entries is not None and "loss" in entries:
            note = (
                f"Of the {type(answer).__name__} that it returned ({', '.join(map(str, entries))}) its loss was taken"
            )
            return _Parts(entries["loss"], [(str(key), entries[key]) for key in entries if key != "loss"], note)
        if not isinstance(answer, list | tuple):
            return _Parts(answer)
        if answer and isinstance(answer[0], Tensor):
            if len(answer) == 2 and (isinstance(answer[1], list | tuple) or _entries(answer[1]) is not None):
                return _Parts(answer[0], [(METRICS, _entries(answer[1]))], PAIR)
            known = list(entries) if entries is not None else self._named(len(answer))
            if len(answer) == 2:
                named = known[0] in _WHOLE and not known[1].endswith("loss")
                one_loss = isinstance(self._function, JaxLoss) or _is_logged(answer[1], named=named)
            else:
                one_loss = len(answer) > 2 and sum(_could_be_the_loss(item, rollout) for item in answer) < 2
            if one_loss:
                labels = [label or type(item).__name__ for label, item in zip(known, answer, strict=True)]
                which = f"Of the {len(answer)} items that it returned ({', '.join(labels)}) the first was taken"
                return _Parts(answer[0], list(zip(labels, answer, strict=True))[1:], f"{which} as the loss")
        kinds = ", ".join(
            f"tensor of shape {tuple(i.shape)}" if isinstance(i, Tensor) else type(i).__name__ for i in answer
        )
        more = " Which of the two is the loss? Detach what is only logged, or name it." if len(answer) == 2 else ""
        raise TargetError(f"{name} returned a {type(answer).__name__} of ({kinds}); accepted are {ACCEPTED}.{more}")

    def _named(self, count: int) -> Sequence[str]:
        if count not in self._names:
            self._names[count] = returned_names(self._function, count)
        return self._names[count]


def _labelled(beside: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield what stands beside a loss by its name; parts of mappings by their keys, joined by "/"."""
    for label, item in beside:
        if isinstance(item, Mapping):
            under = "" if label == METRICS else f"{label}/"
            yield from _labelled([(f"{under}{key}", part) for key, part in item.items()])
        else:
            yield label, item


def _checked(name: str, loss: Any, rollout: Rollout) -> tuple[Tensor, Returned]:
    """Return a loss where its inputs are, and what it is one number of; TargetError for anything else."""
    if not isinstance(loss, Tensor):
        raise _no_tensor(name, loss)
    if not loss.dtype.is_floating_point:
        raise TargetError(f"{name} returned a tensor of {loss.dtype}; a loss must be floating-point: {ACCEPTED}.")
    if loss.layout is not torch.strided or loss.is_meta:
        kind = f"on the device {loss.device}, of the layout {loss.layout}"
        raise TargetError(f"{name} returned a tensor {kind}; a loss must be a dense tensor of numbers: {ACCEPTED}.")
    mask = rollout.peek("mask")
    returned = _kind(loss, rollout)
    if returned is None:
        rows, tokens = mask.shape
        raise TargetError(
            f"{name} returned a tensor of shape {tuple(loss.shape)} for a batch of B = {rows} rollouts of "
            f"T = {tokens} tokens; it must be (), {(rows,)} or {(rows, tokens)}. Reduce it, or keep one number a "
            "sequence or a token."
        )
    return loss.to(mask.device), returned


def as_metric(logged: Any, rollout: Rollout) -> Tensor | None:
    """Return a copy as float64: what the loss logged may share memory with tensors that it uses again."""
    try:
        metric = torch.as_tensor(logged, dtype=torch.float64).detach().cpu().to_dense().clone()
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if _kind(metric, rollout) is None else metric


def is_finite(numbers: Tensor) -> bool:
    """Return False if the sum is not finite; True if torch.vmap maps over the numbers, whose caller looks at all."""
    return is_mapped(numbers) or math.isfinite(float(numbers.detach().sum()))


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


def _entries(thing: Any) -> Mapping[Any, Any] | None:
    """Return the named parts of a mapping, a named tuple, a dataclass or an object with a `loss`; else None."""
    if isinstance(thing, Mapping):
        return thing
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return dict(zip(thing._fields, thing, strict=True))
    if is_dataclass(thing) and not isinstance(thing, type):
        return {one.name: getattr(thing, one.name, None) for one in fields(thing)}
    held = getattr(thing, "__dict__", {})
    return held if "loss" in held and not isinstance(thing, Tensor) else None


def _is_logged(item: Any, *, named: bool) -> bool:
    """Return True for the second item of a pair that cannot be the loss, since it has no gradient or by the `named`."""
    if not isinstance(item, Tensor):
        return item is None or isinstance(item, float | np.floating)
    return not item.requires_grad or (named and item.dim() == 0)


def _could_be_the_loss(item: Any, rollout: Rollout) -> bool:
    """Return True if an item could be the loss as well; a scalar is one more metric."""
    return isinstance(item, Tensor) and item.requires_grad and _kind(item, rollout) in ("rows", "tokens")


def _kind(tensor: Tensor, rollout: Rollout) -> Returned | None:
    shape = tuple(rollout.peek("mask").shape)
    kinds: dict[tuple[int, ...], Returned] = {(): "scalar", shape[:1]: "rows", shape: "tokens"}
    return kinds.get(tuple(tensor.shape))


def _given(name: str, rollout: Rollout, place: tuple[int, ...]) -> str:
    """Return the value of a (B, T) or (B,) field at a place, as text; empty for any other field."""
    given = rollout.built(name)
    if not isinstance(given, Tensor) or not 0 < given.dim() <= 2:
        return ""
    return f"{name} = {given.detach()[place[: given.dim()]].tolist()}"


def _no_tensor(name: str, answer: Any) -> TargetError:
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
    return TargetError(f"{name} returned {what}; accepted are {ACCEPTED}. {why}".strip())
