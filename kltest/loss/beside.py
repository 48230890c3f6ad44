"""The logged KL among what a loss returned beside the loss: what says so by its name and moves with the reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kltest.loss.global_state import preserved
from kltest.loss.jax.bridge import JaxLoss
from kltest.loss.results import Result, as_metric, read
from kltest.loss.returned_names import returned_names
from kltest.loss.view import RolloutView
from kltest.names import says_kl
from kltest.rollout import Rollout

Call = Callable[[RolloutView], Any]


class Beside:
    """Reads the answers of one callable, and decides once what beside its loss is the logged KL."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._aux = function, isinstance(function, JaxLoss)
        self._names: dict[int, Sequence[str]] = {}
        self._moves: dict[str, bool] = {}
        self._note: str | None = None

    def read(self, name: str, answer: Any, rollout: Rollout) -> Result:
        """Return what `name` returned for a rollout; TargetError if that is no loss."""
        return read(name, answer, rollout, names=self._named, aux=self._aux)

    def chosen(self, result: Result, rollout: Rollout, view: RolloutView, call: Call) -> Result:
        """Return the result with its logged KL, if nothing else logged one, and with a sentence that names it.

        `view` is what the loss was given of the rollout; `call` calls it once more, to see what moves with the
        reference.
        """
        if not result.beside:
            return result
        if result.metric is not None:
            return self._noted(result, "and the kl of its metrics as the logged KL")
        named = [(label, item) for label, item in result.beside if says_kl(label)]
        named.sort(key=lambda pair: pair[0] != "kl")
        for label, item in named:
            metric = as_metric(item, rollout)
            if metric is None:
                continue
            if label not in self._moves:
                self._moves[label] = self._differs(label, metric, view.over(_reference_moved(rollout)), call)
            if self._moves[label]:
                return self._noted(replace(result, metric=metric, logged=item), f"and {label} as the logged KL")
        still = " and ".join(label for label, _ in named if self._moves.get(label) is False)
        reason = f"{still} does not move with ref_logp" if still else "nothing there says by its name that it is a KL"
        return self._noted(result, f"and the rest was ignored: {reason}")

    def _noted(self, result: Result, text: str) -> Result:
        """Return the result with the sentence of the first call: at β = 0 a KL may be missing."""
        self._note = self._note or f"{result.note} {text}."
        return replace(result, note=self._note)

    def _named(self, count: int) -> Sequence[str]:
        if count not in self._names:
            self._names[count] = returned_names(self._function, count)
        return self._names[count]

    def _differs(self, label: str, metric: Tensor, moved: RolloutView, call: Call) -> bool:
        try:
            with preserved():
                other = as_metric(dict(self.read("", call(moved), moved).beside).get(label), moved)
        except Exception:  # it may refuse such a reference, and then nothing is known
            return False
        return other is not None and not torch.allclose(other, metric, rtol=1e-9, atol=1e-12, equal_nan=True)


def _reference_moved(rollout: Rollout) -> Rollout:
    """Return the same batch with other log-probs of the reference."""
    fields = {name: lambda name=name: 1.25 * rollout.peek(name) - 0.05 for name in ("ref_logp", "ref_logits")}
    return rollout.replace(**{name: field for name, field in fields.items() if name in rollout})
