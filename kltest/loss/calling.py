"""Losses: callables whose parameters are filled by name, called with rollouts, and what each call did and returned."""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from kltest.errors import KltestError, TargetError, UsageError
from kltest.estimators.spec import Credit, Place, Spec
from kltest.loss.arguments import FieldOf, SupportOf
from kltest.loss.building import ObjectOf
from kltest.loss.callables import described, name_of, source_file
from kltest.loss.derived import DERIVED, Derived
from kltest.loss.filling import Arguments, fill, fixed_beta
from kltest.loss.frames import describe, failure
from kltest.loss.global_state import eagerly, preserved, repeatable_generators, settings_preserved, unusual_input
from kltest.loss.jax.bridge import CALLED as CALLED_WITH_JAX
from kltest.loss.jax.bridge import JaxLoss, jax_loss
from kltest.loss.outcome import Call, Calls, Outcome
from kltest.loss.placement import ROW_FIELDS, place
from kltest.loss.precision import PrecisionTrace, least_precise
from kltest.loss.reach import is_for_jax
from kltest.loss.results import Reader, Result, check_finite, is_finite
from kltest.loss.state import State
from kltest.loss.view import INPUT_FORMS, InputForm, RolloutView, made_unambiguous, unambiguous
from kltest.names import LOGITS, SUPPORT_FIELDS, field_named
from kltest.rollout import LEAVES, NotGivenError, Rollout, is_mapped


def bind(
    function: Callable[..., Any],
    call: Call | None = None,
    name: str | None = None,
    *,
    receiver: ObjectOf | None = None,
    spec: Spec | None = None,
    notes: tuple[str, ...] = (),
) -> "Loss":
    """Make a callable into a Loss: each parameter gets the rollout's field of its name, or the argument given for it.

    Args:
        function: any callable; a class that needs no arguments is built, a module called by its forward.
        call: placement, credit, coefficient and arguments.
        name: what reports call it; default its own name.
        receiver: its `self` if `function` is a plain method.
        spec: description of a registered estimator, whose placement and credit are the defaults.
        notes: sentences for the report.

    Returns:
        The loss, to be called with a Rollout.

    Raises:
        UsageError: it cannot be called with a rollout, nothing fills a parameter, or no parameter takes an argument.
        TargetError: building the class failed.
    """
    name = name or name_of(function)
    function, signature = described(function, name)
    if is_for_jax(function):
        function = jax_loss(function)
    if isinstance(function, JaxLoss):
        notes = (*notes, CALLED_WITH_JAX)
    parameters = list(signature.parameters.values())[receiver is not None :]
    call = call or Call()
    fillings = fill(name, parameters, call, function)
    guessed = [
        f"{key} with {filling.name}"
        for key, filling in fillings.items()
        if isinstance(filling, FieldOf) and key not in call.arguments and field_named(key) is None
    ]
    if guessed:
        notes = (*notes, f"By what their names say, these parameters were filled: {', '.join(guessed)}")
    # First, since a number given for β makes a filling of it.
    beta = fixed_beta(fillings, call)
    arguments = Arguments(tuple(parameters), fillings, receiver)
    placement = call.placement or (spec.placement if spec else "loss")
    shaped = placement == "shaped-reward"
    return Loss(
        name,
        function,
        arguments,
        call,
        spec,
        placement="reward" if placement == "shaped-reward" else placement,
        credit=call.credit or (spec.credit if spec else "return"),
        shaped=shaped,
        unrewarded=shaped,
        less="" if shaped else "coefficient",
        fixed_beta=beta,
        stated=(*notes, *(built.note() for built in arguments.built)),
        calls=Calls.of(function, {one.name: one.built for one in arguments.built}),
        reader=Reader(function),
    )


@dataclass
class Record:
    """Observations of a loss over its calls so far.

    Attributes:
        form: the form in which it last took its fields.
        per_token: True if it wants rewards as (B, T), False if as (B,), None if that is not known.
        traced: the types in which the first call computed, those of steps without a gradient among them.
        returns: True if a call returned a tensor with a gradient.
        reads_beta: True if β was read in a call.
        writes: the change, in words, of each field that it wrote into.
        made_trainable: the constants whose gradient it switched on.
        notes: sentences for the report.
    """

    form: InputForm | None = None
    per_token: bool | None = None
    traced: list[torch.dtype] | None = None
    returns: bool = False
    reads_beta: bool = False
    writes: dict[str, str] = field(default_factory=dict)
    made_trainable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Loss:
    """A callable with its parameters filled, and how what it returns is graded; call it with a rollout.

    Attributes:
        name, function: what reports call it, and what is called.
        arguments: what fills its parameters.
        call, spec: the options that it was made with, and the description of a registered estimator.
        placement, credit: where its values are placed; `shaped`: with their sign changed; `unrewarded`: for rewards
            of zero.
        less: what is subtracted from a call: the loss at β = 0 (if it takes β), or with the policy as reference.
        fixed_beta: the coefficient at which the KL part is taken, None for the rollout's own.
        stated: sentences for the report that are known before a call.
        calls: how often it was called, and how long that took; its copies count with it.
        reader: takes what it returns apart, and finds the logged KL in it.
        forms: the forms in which fields are tried.
        exploring: True if its input is unusual, so that it may give NaN.
        instead: what is called in place of it, for a loss that is like it in all else.
        record: what its calls have shown; alone of all this it changes.
    """

    name: str
    function: Callable[..., Any]
    arguments: Arguments
    call: Call
    spec: Spec | None
    placement: Place
    credit: Credit
    shaped: bool
    unrewarded: bool
    less: Literal["", "coefficient", "reference"]
    fixed_beta: float | None
    stated: tuple[str, ...]
    calls: Calls
    reader: Reader
    forms: tuple[InputForm, ...] = INPUT_FORMS
    exploring: bool = False
    instead: Callable[[Rollout], Outcome] | None = None
    record: Record = field(default_factory=Record)

    @property
    def fields(self) -> Mapping[str, str]:
        """The field that fills each parameter."""
        return self.arguments.fields

    @property
    def takes(self) -> frozenset[str]:
        """The fields that it is given; "rollout" means that it may read any (see `Rollout.accessed`)."""
        return self.arguments.takes

    @property
    def support(self) -> SupportOf | None:
        """The support whose fields it takes: its number of tokens, and whose they are."""
        return self.arguments.support

    @property
    def optional(self) -> tuple[str, ...]:
        """The parameters that a field fills in place of None, but for those without which there is no KL term."""
        needed = ("logp", "beta", "rollout")
        return tuple(name for name, field in self._spare if not field.startswith("ref_") and field not in needed)

    @property
    def of_distributions(self) -> tuple[str, ...]:
        """The parameters that distributions of next tokens fill in place of None, if it has log-probs of tokens too."""
        if not {"logp", "ref_logp"} <= set(self.fields.values()):
            return ()
        return tuple(name for name, field in self._spare if field in LOGITS or field in SUPPORT_FIELDS)

    @property
    def _spare(self) -> list[tuple[str, str]]:
        """Names and fields of the parameters that a field fills in place of None."""
        there = (one.name for one in self.arguments.parameters if one.default is None)
        return [(name, field) for name in there if (field := self.fields.get(name))]

    def without(self, names: Collection[str]) -> "Loss":
        """Return the same loss with the defaults of these parameters; its calls count with it."""
        return self.changed(arguments=self.arguments.without(names), record=Record())

    @property
    def derivable(self) -> tuple[str, ...]:
        """The parameters that keep None, though trainers pass a number for them that is made of the fields."""
        arguments = self.arguments
        return tuple(
            one.name
            for one in arguments.parameters
            if one.default is None and one.name in DERIVED and one.name not in arguments.fillings
        )

    def with_derived(self, names: Collection[str]) -> "Loss":
        """Return the same loss with what trainers pass for these parameters."""
        arguments = self.arguments
        for name in names:
            arguments = arguments.with_value(name, Derived(name))
        return self.changed(arguments=arguments, record=Record())

    def with_support(self, k: int) -> "Loss":
        """Return the same loss with supports of k tokens."""
        return self.changed(arguments=self.arguments.with_support(k), record=Record())

    @property
    def filled(self) -> dict[str, str]:
        """What each parameter gets, in words."""
        return self.arguments.filled

    @property
    def takes_beta(self) -> bool:
        """True if it is called at β and at 0; its objective is the difference over β."""
        return "beta" in self.takes or self.record.reads_beta

    @property
    def notes(self) -> list[str]:
        """Sentences for the report; more may be known after a call."""
        return [*self.stated, *self.record.notes]

    def changed(self, *notes: str, **attributes: Any) -> "Loss":
        """Return the same loss with other values of some attributes and more notes; its calls count with it."""
        return replace(self, stated=(*self.stated, *notes), **attributes)

    def placed(self, value: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Return a value of the loss where it is placed: (B,) or a scalar, whose mean is to be differentiated."""
        # What a reward is placed at is the log-prob itself.
        logp = value if self.placement == "loss" else rollout.peek("logp")
        return place(value, logp, rollout.peek("mask"), self.placement, self.credit)

    def with_value(self, name: str, value: object) -> "Loss":
        """Return the same loss with a value for one of its parameters, or for an attribute of one."""
        return self.changed(arguments=self.arguments.with_value(name, value))

    def for_experiments(self, floats: torch.dtype | None = None, masks: torch.dtype | None = None) -> "Loss":
        """Return the same loss for unusual input: it may be NaN or infinite, and what it does is not recorded here.

        Args:
            floats: the type in which it is given its floating-point fields; None for the usual.
            masks: the type in which it is given its mask, and no other; None for the usual.
        """
        record = replace(self.record, notes=[], writes={}, made_trainable=set())
        same = record.form or INPUT_FORMS[0]
        if floats is None:
            forms = (replace(same, mask_type=masks),) if masks else self.forms
            return self.changed(exploring=True, forms=forms, record=record)
        same = replace(same, floats=floats)
        forms = (same, replace(same, mask_type=None if same.mask_type else torch.bool))
        return self.changed(exploring=True, forms=forms, record=replace(record, form=None, traced=None))

    def within(
        self, surroundings: Callable[[], AbstractContextManager[object]], given: Callable[[Any], Any] | None = None
    ) -> "Loss":
        """Return the same loss, whose calls run inside a context each; one for JAX is left as it is.

        `given` changes the arguments (args, kwargs) of a call.
        """
        if isinstance(self.function, JaxLoss):
            return self
        function = self.function

        def inside(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = given((args, kwargs)) if given else (args, kwargs)
            with surroundings():
                return function(*args, **kwargs)

        return self.changed(function=inside)

    def at(self, beta: float) -> "Loss":
        """Return the part of the same loss that another β adds."""
        return self.changed(fixed_beta=beta, less="coefficient")

    def __repr__(self) -> str:
        return f"<loss {self.name}({', '.join(f'{key}={value}' for key, value in self.fields.items())})>"

    @torch.enable_grad()
    def __call__(self, rollout: Rollout) -> Outcome:
        """Call the loss on one batch; if it takes β, at β and at 0: (ℓ(β) − ℓ(0))/β is its KL part.

        Raises:
            TargetError: it raises (FailedError, with the user's own frame), leaves the process, or returns no loss.
            UsageError: it asks a stand-in object for an attribute that was not given.
        """
        if self.instead is not None:
            return self.instead(rollout)
        if not unambiguous(rollout):
            self.settle(rollout)
        beta = self.beta(rollout)
        # Noise is to be the same in both calls, so that it cancels. Whoever reads the rollout may read β from it.
        twice = self.less == "reference" or self.takes & {"beta", "rollout"}
        random = State(self.calls.generators if twice else ())
        # The first call follows rounding step by step: it does every step twice.
        trace = PrecisionTrace() if self.record.traced is None else nullcontext()
        with trace:
            result, view = self._run(rollout, beta)
        results = {self.name: result}
        loss = result.loss.to(torch.float64)
        self.record.reads_beta |= "beta" in view.accessed
        if self.takes_beta and (not beta or not math.isfinite(beta)):
            raise UsageError(f"β is {beta}: the KL part of {self.name} is taken as (ℓ(β) − ℓ(0))/β, with β ≠ 0")
        if self.less == "reference" or (self.less and self.takes_beta):
            lacking = self.less == "coefficient"
            where = "at β = 0" if lacking else "with the policy as reference"
            random.reset()
            with trace:
                without, _ = self._run(rollout if lacking else rollout.near_reference(), 0.0 if lacking else beta)
            results[f"{self.name} {where}"] = without
            if without.returned not in (result.returned, "scalar"):
                raise TargetError(f"{self.name} returned {result.returned} at β = {beta}, {without.returned} {where}")
            loss = loss - without.loss.to(torch.float64)
        loss = loss / beta if self.takes_beta else loss
        placed = self.placed(loss, rollout)
        if not self.exploring and not is_finite(placed):
            for name, part in results.items():
                check_finite(name, part.loss, rollout, self.fields)
        if isinstance(trace, PrecisionTrace):
            self.record.traced = [getattr(self.function, "precision", None) or torch.float64]
            self.record.traced += [trace.of(part.loss) for part in results.values()]
        scalar = result.returned == "scalar"
        types = [*(self.record.traced or ()), *(part.loss.dtype for part in results.values())]
        return Outcome(
            objective=placed if scalar else placed.mean(),
            returned=result.returned,
            rows=None if scalar else placed,
            value=None if scalar else loss.detach(),
            metric=result.metric,
            dtype=str(least_precise(types)).removeprefix("torch."),
        )

    def settle(self, rollout: Rollout) -> None:
        """Learn on a batch if the loss wants rewards and advantages as (B,) or as (B, T), for all later calls.

        With one token, or as many tokens as rows, a (B,) field combines with a (B, T) one into something else without
        an error, so a copy of the batch is used in which B and T differ. A loss that takes neither field is not called;
        one that fails there in every form stays undecided, and gets (B,) as long as that works.
        """
        if self.record.per_token is None and self.takes & {*ROW_FIELDS, "rollout"}:
            with preserved(), suppress(KltestError):
                self._run(made_unambiguous(rollout), self.beta(rollout))

    def beta(self, rollout: Rollout) -> float:
        """Return the coefficient at which it is graded: the one that was asked for, or the rollout's."""
        return rollout.peek("beta") if self.fixed_beta is None else self.fixed_beta

    def returned(self, rollout: Rollout, beta: float | None = None) -> Result:
        """Return what one call at β (default: that of `__call__`) returned and logged, before it is placed."""
        return self._run(rollout, self.beta(rollout) if beta is None else beta)[0]

    def _run(self, rollout: Rollout, beta: float) -> tuple[Result, RolloutView]:
        """Call once in the first form of fields that the loss accepts; later calls begin with that form."""
        # Errors of a loss that needs its fields in another form; JAX raises ValueError for shapes.
        of_jax = (ValueError,) if isinstance(self.function, JaxLoss) else ()
        refusals = (TypeError, IndexError, RuntimeError, AssertionError, *of_jax)
        errors: list[BaseException] = []
        forms = [form for form in self.forms if self.record.per_token in (None, form.per_token)]
        forms.sort(key=lambda form: form is not self.record.form)
        if (leaf := rollout.built("logp")) is not None and is_mapped(leaf):
            forms = forms[:1]  # what torch.vmap refuses is no matter of the form
        for form in forms:
            if errors and not form.may_fix(errors, rollout.accessed):
                continue
            view = RolloutView(rollout, beta, form, always_copy=bool(self.record.writes), unrewarded=self.unrewarded)
            clean = {name for name in LEAVES if getattr(rollout.built(name), "grad", None) is None}
            try:
                answer = self._call(view)
            except (KeyboardInterrupt, KltestError):
                raise
            except BaseException as error:
                if not isinstance(error, refusals):
                    raise self._failure(error, beta) from error
                errors.append(error)
                continue
            finally:
                rollout.accessed |= view.accessed
            if errors:
                used, refused = form.unlike(forms[0]), forms[0].unlike(form)
                self.record.notes.append(f"It was given {used}: with {refused} it raised {describe(errors[0])}")
            self.record.form = form
            if unambiguous(rollout):
                self.record.per_token = form.per_token
            self._check_inputs(rollout, view, clean)
            answer = self._as_tensor(answer, beta)
            result = self.reader.read(self.name, answer, rollout, view, self._call)
            self.record.returns |= result.loss.requires_grad
            if result.note and result.note not in self.notes:
                self.record.notes.append(result.note)
            return (replace(result, loss=-result.loss) if self.shaped else result), view
        raise self._failure(errors[0], beta) from errors[0]

    def _as_tensor(self, answer: Any, beta: float) -> Any:
        """Return what a call returned, a number as a tensor, and None as zero.

        That is a loss without its KL term, or one that has returned tensors and leaves a step out.
        """
        if type(answer) is tuple and answer:
            return (self._as_tensor(answer[0], beta), *answer[1:])
        number = isinstance(answer, int | float) and not isinstance(answer, bool)
        if (number and beta == 0) or (self.record.returns and (number or answer is None)):
            return torch.tensor(float(answer or 0.0), dtype=torch.float64)
        return answer

    def _call(self, view: RolloutView) -> Any:
        positional, named = self.arguments.of(view)
        unusual = unusual_input() if self.exploring else nullcontext()
        with settings_preserved(), repeatable_generators(), torch.enable_grad(), eagerly(), unusual, self.calls:
            return self.function(*positional, **named)

    def _check_inputs(self, rollout: Rollout, view: RolloutView, clean: set[str]) -> None:
        writes = view.writes()
        for name in sorted(writes):
            if view.shared(name):
                what = "the policy's own log-probs" if name in LEAVES else "an input that is shared with other calls"
                raise TargetError(
                    f"{self.name} wrote into {name}, {what}, in place. Work on a copy: {name} = {name}.clone()."
                )
        self.record.writes = {**writes, **self.record.writes}
        self.record.made_trainable |= view.made_trainable()
        for name in clean:
            leaf = rollout.built(name)
            if leaf is not None and leaf.grad is not None:
                leaf.grad = None
                raise TargetError(
                    f"{self.name} called backward() itself; return the loss and kltest differentiates it."
                )

    def _failure(self, error: BaseException, beta: float) -> KltestError:
        lacks = (
            str(error)
            if isinstance(error, NotGivenError)
            else "".join(one.lacks(error) for one in self.arguments.built)
        )
        if lacks:
            return UsageError(f"{self.name}: {lacks}")
        at = " (called with β = 0, to take the part that β multiplies)" if self.takes_beta and beta == 0 else ""
        return failure(self.name + at, error, source_file(self.function))
