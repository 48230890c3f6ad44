"""One call of a function on a rollout: in the form that it accepts, with what it did to its inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from kltest.errors import KltestError, TargetError, UsageError
from kltest.loss.arguments import Stub
from kltest.loss.callables import source_file
from kltest.loss.filling import FieldOf, Filling, arguments
from kltest.loss.frames import describe, failure
from kltest.loss.global_state import settings_preserved
from kltest.loss.jax.bridge import CALLED as CALLED_WITH_JAX
from kltest.loss.jax.bridge import JaxLoss, jax_loss
from kltest.loss.jax.recognition import may_be_for_jax
from kltest.loss.modes import AsArrays, eagerly, needs_arrays, no_index_by
from kltest.loss.results import Result, read, with_stored
from kltest.loss.stored_metrics import StoredMetrics
from kltest.loss.view import INPUT_FORMS, InputForm, RolloutView, unambiguous
from kltest.rollout import LEAVES, NotGivenError, Rollout


class Invocation:
    """A function with its parameters filled, and a record of what it did to its inputs.

    `form` is the one in which it last took its fields, None before the first call.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fillings: dict[str, Filling],
        parameters: list[inspect.Parameter],
        receiver: Stub | None,
        notes: tuple[str, ...],
    ) -> None:
        self.name = name
        self.notes = list(notes)
        self.writes: dict[str, str] = {}
        self.made_trainable: set[str] = set()
        self.fields = {key: filling.name for key, filling in fillings.items() if isinstance(filling, FieldOf)}
        stubs = [filling for filling in (*fillings.values(), receiver) if isinstance(filling, Stub)]
        self.takes = frozenset(self.fields.values()).union(*(stub.fields() for stub in stubs))
        self.takes_beta = "beta" in self.takes
        self.home = source_file(function)
        self.function, self.fillings, self.parameters, self.receiver = function, fillings, parameters, receiver
        self._forms: tuple[InputForm, ...] = INPUT_FORMS
        self.form: InputForm | None = None
        self._per_token: bool | None = None
        self._must_be_finite = True
        self._as_arrays = False
        # Mappings and stand-in objects, in which a loss may store its metrics: as given, and those of the last call.
        self._holders = [filling for filling in (*fillings.values(), receiver) if isinstance(filling, Stub | Mapping)]
        self._first_holders = self._holders
        self._stored = StoredMetrics(function)

    def _run(self, rollout: Rollout, beta: float) -> tuple[Result, RolloutView]:
        """Call once; if that fails with tensors and the loss may be written for JAX, use JAX arrays from then on."""
        try:
            return self._run_in_some_form(rollout, beta)
        except TargetError:
            if isinstance(self.function, JaxLoss) or not may_be_for_jax(self.function):
                raise
            other = copy.copy(self)
            other.notes, other.writes, other.made_trainable = [], {}, set()
            other.function = jax_loss(self.function)
            with suppress(KltestError):
                found = other._run_in_some_form(rollout, beta)
                self.__dict__.update(other.__dict__, notes=[*self.notes, *other.notes, CALLED_WITH_JAX])
                return found
            raise

    def _run_in_some_form(self, rollout: Rollout, beta: float) -> tuple[Result, RolloutView]:
        """Call once in the first form of fields that the loss accepts; later calls begin with that form."""
        first: BaseException | None = None
        halfway: tuple[InputForm, BaseException] | None = None
        forms = [form for form in self._forms if self._per_token in (None, form.per_token)]
        forms.sort(key=lambda form: form is not self.form)
        for form in forms:
            if first is not None and not form.may_fix(first, rollout.accessed):
                continue
            view = RolloutView(rollout, beta, form, always_copy=bool(self.writes))
            clean = {name for name in LEAVES if getattr(rollout.built(name), "grad", None) is None}
            before = self._stored.look(self._first_holders)
            try:
                answer = self._call(view)
            except self._refusals as error:
                if first is not None and form.goes_on(forms[0], first, error):
                    halfway = halfway or (form, error)
                first = first or error
                continue
            except (KeyboardInterrupt, KltestError):
                raise
            except BaseException as error:
                if first is not None and form.lists:
                    continue
                raise self._failure(error, beta) from error
            finally:
                rollout.accessed |= view.accessed
            if first is not None:
                used, refused = form.unlike(forms[0]), forms[0].unlike(form)
                self.notes.append(f"It was given {used}: with {refused} it raised {describe(first)}")
            self.form = form
            if unambiguous(rollout):
                self._per_token = form.per_token
            self._check_inputs(rollout, view, clean)
            result = read(self.name, _zero_as_tensor(answer, beta), rollout, lists=view.gave_lists)
            if result.metric is None:
                again = partial(self._call_again, RolloutView(rollout, beta, form, always_copy=bool(self.writes)))
                result = with_stored(result, *self._stored.read(before, self._holders, again), rollout)
            if result.note and result.note not in self.notes:
                self.notes.append(result.note)
            return result, view
        assert first is not None
        if halfway is not None:
            raise UsageError(self._needs_two_conversions(forms[0], first, *halfway)) from first
        raise self._failure(first, beta) from first

    def _needs_two_conversions(
        self, form: InputForm, first: BaseException, other: InputForm, second: BaseException
    ) -> str:
        return (
            f"{self.name} cannot be given its fields as it wants them: with {form.unlike(other)} it raised "
            f"{describe(first)}; with {other.unlike(form)}, {describe(second)}. kltest gives float32 fields, rewards "
            "per token, or lists of tensors, one of the three at a time. Convert the others in a function of your own: "
            "def loss(logp, advantage): return f(logp.float(), advantage[:, None].expand_as(logp).float())"
        )

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        """Exceptions that a loss raises if it needs its fields in another form; JAX raises ValueError for shapes."""
        usual = (TypeError, IndexError, RuntimeError, AssertionError)
        return (*usual, ValueError) if isinstance(self.function, JaxLoss) else usual

    def _call(self, view: RolloutView) -> Any:
        """Call once; if an experiment's input cannot become a NumPy array, once more so that it can."""
        if self._must_be_finite:
            return self._call_once(view)
        with np.errstate(all="ignore"):
            if not self._as_arrays:
                try:
                    return self._call_once(view)
                except (RuntimeError, TypeError) as error:
                    if not needs_arrays(error):
                        raise
                    self._as_arrays = True
            with AsArrays():
                return self._call_once(view)

    def _call_once(self, view: RolloutView) -> Any:
        positional, named, self._holders = arguments(self.parameters, self.fillings, self.receiver, view)
        mask = view.peek("mask") if self.takes & {"mask", "rollout"} else None
        with settings_preserved(), torch.enable_grad(), eagerly(), no_index_by(mask):
            return self.function(*positional, **named)

    def _call_again(self, view: RolloutView) -> list[Any]:
        self._call_once(view)
        return self._holders

    def _check_inputs(self, rollout: Rollout, view: RolloutView, clean: set[str]) -> None:
        writes = view.writes()
        for name in sorted(writes):
            if view.shared(name):
                what = "the policy's own log-probs" if name in LEAVES else "an input that is shared with other calls"
                raise TargetError(
                    f"{self.name} wrote into {name}, {what}, in place. Work on a copy: {name} = {name}.clone()."
                )
        self.writes = {**writes, **self.writes}
        self.made_trainable |= view.made_trainable()
        for name in clean:
            leaf = rollout.built(name)
            if leaf is not None and leaf.grad is not None:
                leaf.grad = None
                raise TargetError(
                    f"{self.name} called backward() itself; return the loss and kltest differentiates it."
                )

    def _failure(self, error: BaseException, beta: float) -> KltestError:
        if isinstance(error, NotGivenError):
            return UsageError(f"{self.name}: {error}")
        at = " (called with β = 0, to take the part that β multiplies)" if self.takes_beta and beta == 0 else ""
        return failure(self.name + at, error, self.home)


def _zero_as_tensor(answer: Any, beta: float) -> Any:
    """Turn a number into a tensor at β = 0: a loss without its KL term may be the number 0."""
    plain = isinstance(answer, int | float) and not isinstance(answer, bool)
    return torch.tensor(float(answer), dtype=torch.float64) if beta == 0 and plain else answer
