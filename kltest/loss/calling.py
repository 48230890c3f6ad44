"""Calling a loss with a rollout: parameters filled by name, whatever it returns turned into an Outcome."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from kltest.errors import KltestError, TargetError, UsageError
from kltest.estimators.spec import Credit, Placement, Spec
from kltest.loss.arguments import Stub
from kltest.loss.callables import described, name_of
from kltest.loss.filling import Filling, fill, fixed_beta
from kltest.loss.global_state import RandomState, preserved
from kltest.loss.invocation import Invocation
from kltest.loss.jax.bridge import CALLED as CALLED_WITH_JAX
from kltest.loss.jax.bridge import JaxLoss, jax_loss
from kltest.loss.jax.recognition import is_for_jax
from kltest.loss.outcome import Call, Outcome
from kltest.loss.placement import place
from kltest.loss.precision import PrecisionTrace, lowest_precision
from kltest.loss.results import Result, check_finite
from kltest.loss.view import INPUT_FORMS, ROW_FIELDS, made_unambiguous, unambiguous
from kltest.rollout import Rollout

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
    """Make a callable into a Loss: each parameter gets the rollout's field of its name, or the argument given for it.

    Args:
        function: any callable; a class that needs no arguments is built, a module called by its forward.
        call: placement, credit, coefficient and arguments.
        name: what reports call it; default its own name.
        receiver: stands in for `self` if `function` is a plain method.
        spec: description of a registered estimator, whose placement and credit are the defaults.
        notes: sentences for the report.

    Returns:
        The loss, to be called with a Rollout.

    Raises:
        UsageError: it cannot be called with a rollout, nothing fills a parameter, or no parameter takes an argument.
        TargetError: building the class failed.
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


class BoundLoss(Invocation):
    """A callable with its parameters filled (see kltest.loss.outcome.Loss).

    `fixed_beta` is the coefficient at which the KL part is taken, None for the rollout's own.
    """

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
        # First, since a number given for β makes a filling of it.
        self.fixed_beta = fixed_beta(fillings, call)
        super().__init__(name, function, fillings, parameters, receiver, notes)
        self.spec = spec
        self.placement: Placement = call.placement or (spec.placement if spec else "loss")
        self.credit: Credit = call.credit or (spec.credit if spec else "return")
        self.settings: dict[str, object] = dict(call.arguments)
        self.costly = bool(getattr(function, "costly", False))
        self._traced: list[torch.dtype] | None = None

    def for_experiments(self, floats: torch.dtype | None = None) -> BoundLoss:
        """Return the same loss for unusual input: it may be NaN or infinite, and what it does is not recorded here.

        Args:
            floats: the type in which it is given its floating-point fields; None for the usual.
        """
        other = copy.copy(self)
        other.notes, other.writes, other.made_trainable = [], {}, set()
        other._must_be_finite = False
        if floats is not None:
            found = self.form or INPUT_FORMS[0]
            same = replace(found, floats=floats, mask=floats if found.mask.is_floating_point else found.mask)
            others = (replace(same, mask=mask) for mask in (floats, torch.bool, torch.int64) if mask != same.mask)
            other._forms, other.form, other._traced = (same, *others), None, None
        return other

    def at(self, beta: float) -> BoundLoss:
        """Return the same loss with another β."""
        other = copy.copy(self)
        other.fixed_beta = beta
        return other

    def __repr__(self) -> str:
        return f"<loss {self.name}({', '.join(f'{key}={value}' for key, value in self.fields.items())})>"

    @torch.enable_grad()
    def __call__(self, rollout: Rollout) -> Outcome:
        """Call the loss on one batch; if it takes β, at β and at 0: (ℓ(β) − ℓ(0))/β is its KL part.

        Raises:
            TargetError: it raises (FailedError, with the user's own frame), leaves the process, or returns no loss.
            UsageError: it asks a stand-in object for an attribute that was not given.
        """
        if not unambiguous(rollout):
            self.settle(rollout)
        beta = self.beta(rollout)
        # Noise is to be the same in both calls, so that it cancels. Whoever reads the rollout may read β from it.
        random = RandomState() if self.takes & {"beta", "rollout"} else None
        trace = PrecisionTrace() if self._traced is None and len(rollout) <= _TRACED_ROWS else nullcontext()
        with trace:
            result, view = self._run(rollout, beta)
        results = {self.name: result}
        loss = result.loss.to(torch.float64)
        self.takes_beta = self.takes_beta or "beta" in view.accessed
        if self.takes_beta:
            if not beta or not math.isfinite(beta):
                raise UsageError(f"β is {beta}: the KL part of {self.name} is taken as (ℓ(β) − ℓ(0))/β, with β ≠ 0")
            if random is not None:
                random.restore()
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

    def settle(self, rollout: Rollout) -> None:
        """Learn on a batch if the loss wants rewards and advantages as (B,) or as (B, T), for all later calls.

        With one token, or as many tokens as rows, a (B,) field combines with a (B, T) one into something else without
        an error, so a copy of the batch is used in which B and T differ. A loss that takes neither field is not called;
        one that fails there in every form stays undecided, and gets (B,) as long as that works.
        """
        if self._per_token is not None or not self.takes & {*ROW_FIELDS, "rollout"}:
            return
        with preserved(), suppress(KltestError):
            self._run(made_unambiguous(rollout), self.beta(rollout))

    def beta(self, rollout: Rollout) -> float:
        """Return the coefficient at which it is graded: the one that was asked for, or the rollout's."""
        return rollout.peek("beta") if self.fixed_beta is None else self.fixed_beta

    def returned(self, rollout: Rollout, beta: float | None = None) -> Result:
        """Return what one call at β (default: that of `__call__`) returned and logged, before it is placed."""
        return self._run(rollout, self.beta(rollout) if beta is None else beta)[0]
