"""Calling a loss with a rollout: parameters filled by name, whatever it returns turned into an Outcome."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kltest.errors import KltestError, TargetError, UsageError
from kltest.estimators.spec import Credit, Placement, Spec
from kltest.loss.arguments import Stub
from kltest.loss.callables import described, eagerly, name_of, source_file
from kltest.loss.filling import FieldOf, Filling, fill, fixed_beta, value_of
from kltest.loss.frames import describe, failure
from kltest.loss.global_state import settings_preserved
from kltest.loss.jax.bridge import CALLED as CALLED_WITH_JAX
from kltest.loss.jax.bridge import JaxLoss, jax_loss
from kltest.loss.jax.recognition import is_for_jax, may_be_for_jax
from kltest.loss.numbers import AsNumbers, refused
from kltest.loss.outcome import Call, Outcome
from kltest.loss.placement import place
from kltest.loss.precision import PrecisionTrace, lowest_precision
from kltest.loss.results import Result, check_finite, read, with_stored
from kltest.loss.stored_metrics import Entry, Place, StoredMetrics
from kltest.loss.view import (
    INPUT_FORMS,
    ROW_FIELDS,
    InputForm,
    RolloutView,
    no_integer_mask_as_index,
    telling_rows_from_tokens,
    tells_rows_from_tokens,
)
from kltest.rollout import LEAVES, NotGivenError, Rollout

_TRACED_ROWS = 4096
"""The first call follows rounding step by step, unless the batch is larger than this: it does every step twice."""


def bind(
    function: Callable[..., Any],
    call: Call | None = None,
    name: str | None = None,
    *,
    receiver: Stub | None = None,
    spec: Spec | None = None,
    notes: tuple[str, ...] = (),
) -> BoundLoss:
    """A callable made into a Loss: each parameter gets the rollout's field of its name, or the argument given for it.

    `receiver` stands in for `self` where `function` is a plain method. Raises UsageError for what cannot be called
    with a rollout, for a parameter that nothing fills, and for an argument that no parameter takes.
    """
    call = call or Call()
    name = name or name_of(function)
    function, signature = described(function, name)
    if is_for_jax(function):
        function = jax_loss(function)
    if isinstance(function, JaxLoss):
        notes = (*notes, CALLED_WITH_JAX)
    parameters = list(signature.parameters.values())
    if receiver is not None:
        parameters = parameters[1:]
    return BoundLoss(name, function, fill(name, parameters, call), parameters, call, receiver, spec, notes)


@dataclass(frozen=True)
class Recipe:
    """What it takes to call a function by hand as a BoundLoss calls it.

    `form` is the one in which it last took its fields, None before the first call; `beta` the coefficient at which the
    KL part is taken, None for the rollout's own.
    """

    function: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]
    fillings: Mapping[str, Filling]
    receiver: Stub | None
    form: InputForm | None
    beta: float | None


class BoundLoss:
    """A loss made ready (see kltest.loss.outcome.Loss)."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fillings: dict[str, Filling],
        parameters: list[inspect.Parameter],
        call: Call,
        receiver: Stub | None,
        spec: Spec | None,
        notes: tuple[str, ...],
    ) -> None:
        self.name = name
        self.spec = spec
        self.notes = list(notes)
        self.writes: dict[str, str] = {}
        self.made_trainable: set[str] = set()
        self.placement: Placement = call.placement or (spec.placement if spec else "loss")
        self.credit: Credit = call.credit or (spec.credit if spec else "return")
        self.settings: dict[str, object] = dict(call.arguments)
        self._beta = fixed_beta(fillings, call)
        self.fields = {key: filling.name for key, filling in fillings.items() if isinstance(filling, FieldOf)}
        stubs = [filling for filling in (*fillings.values(), receiver) if isinstance(filling, Stub)]
        self.takes = frozenset(self.fields.values()).union(*(stub.fields() for stub in stubs))
        self.takes_beta = "beta" in self.takes
        self.costly = bool(getattr(function, "costly", False))
        self.home = source_file(function)
        self._function, self._fillings, self._parameters, self._receiver = function, fillings, parameters, receiver
        self._forms: tuple[InputForm, ...] = INPUT_FORMS
        self._form: InputForm | None = None
        self._must_be_finite = True
        self._as_numbers = False
        self._per_token: bool | None = None
        self._traced: list[torch.dtype] | None = None
        self._given = {key: filling for key, filling in (*fillings.items(), ("", receiver)) if _keeps(filling)}
        self._stored = StoredMetrics(function, list(self._given.values()))

    @property
    def mutated(self) -> set[str]:
        """The fields that it was seen writing into; `writes` says what became of them."""
        return set(self.writes)

    def for_experiments(self, floats: torch.dtype | None = None) -> BoundLoss:
        """The same loss, for input that is no usual one: its value may be NaN or infinite, and what it does is not
        remembered here. `floats` is the type in which it is given its floating-point fields.
        """
        other = copy.copy(self)
        other.notes, other.writes, other.made_trainable = [], {}, set()
        other._must_be_finite = False
        if floats is not None:
            found = self._form or INPUT_FORMS[0]
            same = replace(found, floats=floats, mask=floats if found.mask.is_floating_point else found.mask)
            others = (replace(same, mask=mask) for mask in (floats, torch.bool, torch.int64) if mask != same.mask)
            other._forms, other._form, other._traced = (same, *others), None, None
        return other

    def at(self, beta: float) -> BoundLoss:
        """The same loss with another β."""
        other = copy.copy(self)
        other._beta = beta
        return other

    def __repr__(self) -> str:
        return f"<loss {self.name}({', '.join(f'{key}={value}' for key, value in self.fields.items())})>"

    @property
    def recipe(self) -> Recipe:
        return Recipe(self._function, tuple(self._parameters), self._fillings, self._receiver, self._form, self._beta)

    @torch.enable_grad()
    def __call__(self, rollout: Rollout) -> Outcome:
        """The loss on one batch.

        Raises TargetError where the loss raises (FailedError, with the user's own frame), leaves the process, or
        returns what is no loss; UsageError where it asks a stand-in object for an attribute that was not given.
        """
        if not tells_rows_from_tokens(rollout):
            self.settle(rollout)
        beta = self.beta(rollout)
        random = torch.get_rng_state()
        trace = PrecisionTrace() if self._traced is None and len(rollout) <= _TRACED_ROWS else nullcontext()
        with trace:
            result, view = self._run(rollout, beta)
        results = {self.name: result}
        loss = result.loss.to(torch.float64)
        self.takes_beta = self.takes_beta or "beta" in view.accessed
        if self.takes_beta:
            if not beta or not math.isfinite(beta):
                raise UsageError(f"β is {beta}: the KL part of {self.name} is taken as (ℓ(β) − ℓ(0))/β, with β ≠ 0")
            torch.set_rng_state(random)
            with trace:
                without, _ = self._run(rollout, 0.0)
            results[f"{self.name} at β = 0"] = without
            if without.returned not in (result.returned, "scalar"):
                raise TargetError(f"{self.name} returned {result.returned} at β = {beta}, {without.returned} at β = 0")
            loss = (loss - without.loss.to(torch.float64)) / beta
        logp = loss if self.placement == "loss" else rollout.peek("logp")
        placed = place(loss, logp, rollout.peek("mask"), self.placement, self.credit)
        if self._must_be_finite and not math.isfinite(float(placed.detach().sum())):
            for name, part in results.items():
                check_finite(name, part.loss, rollout, self.fields)
        if isinstance(trace, PrecisionTrace):
            self._traced = [trace.of(part.loss) for part in results.values()]
        scalar = result.returned == "scalar"
        return Outcome(
            objective=placed if scalar else placed.mean(),
            returned=result.returned,
            rows=None if scalar else placed,
            value=None if scalar else loss.detach(),
            metric=result.metric,
            dtype=lowest_precision((part.loss for part in results.values()), self._traced or ()),
        )

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        """What a loss may raise that wants its fields in another way: JAX says of shapes that values are wrong."""
        usual = (TypeError, IndexError, RuntimeError, AssertionError)
        return (*usual, ValueError) if isinstance(self._function, JaxLoss) else usual

    def settle(self, rollout: Rollout) -> None:
        """Find out on a batch whether the loss wants rewards and advantages as (B,) or as (B, T), for all later calls.

        With one token, or as many tokens as rows, a (B,) field combines with a (B, T) one into something else without
        an error, so the question is put to a copy of the batch where B and T differ. A loss that takes neither field is
        not called; one that fails there whatever it is given stays unsettled, and is given (B,) where that works.
        """
        if self._per_token is not None or not self.takes & {*ROW_FIELDS, "rollout"}:
            return
        with torch.random.fork_rng(devices=[]), suppress(KltestError):
            self._run(telling_rows_from_tokens(rollout), self.beta(rollout))

    def beta(self, rollout: Rollout) -> float:
        """The coefficient at which it is graded: the one that was asked for, or the rollout's."""
        return rollout.peek("beta") if self._beta is None else self._beta

    def _run(self, rollout: Rollout, beta: float) -> tuple[Result, RolloutView]:
        """One call; where it fails with tensors and the loss may be written for JAX, with JAX arrays from then on."""
        try:
            return self._run_as_it_is(rollout, beta)
        except TargetError:
            if isinstance(self._function, JaxLoss) or not may_be_for_jax(self._function):
                raise
            other = self.for_experiments()
            other._function, other._must_be_finite = jax_loss(self._function), self._must_be_finite
            with suppress(KltestError):
                found = other._run_as_it_is(rollout, beta)
                self.__dict__.update(other.__dict__, notes=[*self.notes, *other.notes, CALLED_WITH_JAX])
                return found
            raise

    def _run_as_it_is(self, rollout: Rollout, beta: float) -> tuple[Result, RolloutView]:
        """One call, with the first kind of fields that the loss accepts; the calls that follow begin with that kind."""
        first: BaseException | None = None
        forms = [form for form in self._forms if self._per_token in (None, form.per_token)]
        forms.sort(key=lambda form: form is not self._form)
        for form in forms:
            if first is not None and not form.may_mend(first, rollout.accessed):
                continue
            view = RolloutView(rollout, beta, form, always_copy=bool(self.writes))
            clean = {name for name in LEAVES if getattr(rollout.built(name), "grad", None) is None}
            before = self._stored.look()
            try:
                answer = self._called(view)
            except self._refusals as error:
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
                given, refused = form.unlike(forms[0]), forms[0].unlike(form)
                self.notes.append(f"It was given {given}: with {refused} it raised {describe(first)}")
            self._form = form
            if tells_rows_from_tokens(rollout):
                self._per_token = form.per_token
            self._check_inputs(rollout, view, clean)
            result = read(self.name, _zero_as_tensor(answer, beta), rollout, lists=view.gave_lists)
            if result.metric is None:
                result = self._with_stored(result, before, rollout, beta, form)
            if result.note and result.note not in self.notes:
                self.notes.append(result.note)
            return result, view
        assert first is not None
        raise self._failure(first, beta) from first

    def returned(self, rollout: Rollout, beta: float | None = None) -> Result:
        """What one call at β (default: that of `__call__`) returned and logged, before it is placed."""
        return self._run(rollout, self.beta(rollout) if beta is None else beta)[0]

    def _with_stored(
        self, result: Result, before: Mapping[Place, Entry], rollout: Rollout, beta: float, form: InputForm
    ) -> Result:
        """The result of the call that was just made, with the KL that it stored in what it was given or owns."""

        def again() -> list[Any]:
            self._call_once(RolloutView(rollout, beta, form, always_copy=bool(self.writes)))
            return list(self._given.values())

        stored, note = self._stored.read(before, list(self._given.values()), again)
        return with_stored(result, stored, note, rollout)

    def _called(self, view: RolloutView) -> Any:
        """One call; where an experiment's input cannot become a NumPy array, another in which it can."""
        if self._must_be_finite:
            return self._call_once(view)
        with np.errstate(all="ignore"):
            if not self._as_numbers:
                try:
                    return self._call_once(view)
                except (RuntimeError, TypeError) as error:
                    if not refused(error):
                        raise
                    self._as_numbers = True
            with AsNumbers():
                return self._call_once(view)

    def _call_once(self, view: RolloutView) -> Any:
        positional, named = [], {}
        values = {key: value_of(filling, view) for key, filling in self._fillings.items()}
        for parameter in self._parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if parameter.name in self._fillings:
                value = values[parameter.name]
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                value = parameter.default
            else:
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        known = {parameter.name for parameter in self._parameters}
        named.update({key: value for key, value in values.items() if key not in known})
        if self._receiver is not None:
            values[""] = self._receiver.at(view)
            positional.insert(0, values[""])
        self._given = {key: values[key] for key in self._given}
        mask = view.peek("mask") if "mask" in self.takes or "rollout" in self.takes else None
        with settings_preserved(), torch.enable_grad(), eagerly(), no_integer_mask_as_index(mask):
            return self._function(*positional, **named)

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


def _keeps(filling: Filling) -> bool:
    """Whether a loss may keep its metrics in what it is given."""
    return isinstance(filling, Stub | Mapping)


def _zero_as_tensor(answer: Any, beta: float) -> Any:
    """Without its KL term a loss may be the number 0 and no tensor at all."""
    plain = isinstance(answer, int | float) and not isinstance(answer, bool)
    return torch.tensor(float(answer), dtype=torch.float64) if beta == 0 and plain else answer
