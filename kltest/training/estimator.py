"""Binding of a run's estimator, and the sets of runs that can share its calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from kltest.errors import UsageError
from kltest.estimators import Spec, find, registry
from kltest.loss.calling import Loss, bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.training.problems import PerRun, Run


class WithColumns:
    """A function whose parameters `own` are filled from `columns`, a tensor for each, set before every call."""

    def __init__(self, function: Callable[..., Any], own: Sequence[str], name: str) -> None:
        signature = inspect.signature(function)
        for option in own:
            if option not in signature.parameters:
                raise UsageError(f"{name} has no parameter {option!r}; it takes {', '.join(signature.parameters)}")
        self.columns: dict[str, Tensor] = {}
        self.function = function
        left = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in own]
        self.__signature__ = signature.replace(parameters=left)

    def __call__(self, **fields: Any) -> Any:
        return self.function(**fields, **self.columns)


def bound(run: Run) -> Loss:
    """Bind the run's estimator, its PerRun options left open. Raises UsageError if it cannot be called."""
    plain = {name: value for name, value in run.options.items() if not isinstance(value, PerRun)}
    own = [name for name in run.options if name not in plain]
    call = Call(run.placement, run.credit, None, plain)
    if isinstance(run.estimator, str) and not _registered(run.estimator):
        if own:
            raise UsageError(f"{run.estimator}: a PerRun option is for registered estimators and for callables")
        return resolve(run.estimator, call)
    spec: Spec | None
    if isinstance(run.estimator, str):
        estimator = find(run.estimator)
        function, name, spec = estimator.function, estimator.spec.name, estimator.spec
    else:
        assert run.estimator is not None
        function, name = run.estimator, getattr(run.estimator, "__qualname__", type(run.estimator).__name__)
        spec = next((entry.spec for entry in registry().values() if entry.function is function), None)
    return bind(WithColumns(function, own, name) if own else function, call, name, spec=spec)


def is_built_in(loss: Loss) -> bool:
    """Return whether the estimator is one of this package, whose SPEC is tested."""
    function = loss.function
    function = function.function if isinstance(function, WithColumns) else function
    return loss.spec is not None and getattr(function, "__module__", "").startswith("kltest.estimators.")


def sharing(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of the runs, grouped into those whose estimator can be called for all of them at once.

    A function that takes β is called for one β at a time: it may not accept a tensor of them.
    """
    takes_beta: dict[Hashable, bool] = {}
    together: dict[Hashable, list[int]] = {}
    for row, run in enumerate(runs):
        same = _likeness(run)
        if same not in takes_beta:
            takes = frozenset() if run.estimator is None else bound(run).takes
            takes_beta[same] = bool(takes & {"beta", "rollout"})
        together.setdefault((same, run.beta if takes_beta[same] else None), []).append(row)
    return list(together.values())


def _likeness(run: Run) -> Hashable:
    """A key that is equal for runs that call the same function in the same way."""
    estimator = run.estimator if run.estimator is None or isinstance(run.estimator, str) else id(run.estimator)
    options = tuple((name, *_same(value)) for name, value in sorted(run.options.items()))
    return estimator, run.placement, run.credit, run.whole, options


def _same(value: Any) -> tuple[Hashable, ...]:
    """A key that is equal for equal values of an option; the numbers of all PerRun count as equal."""
    if isinstance(value, PerRun):
        return ("PerRun", id(value.value)) if callable(value.value) else ("PerRun",)
    # The type belongs to the key: 1, 1.0 and True are equal, but a function may distinguish them.
    kind = type(value).__name__
    return (kind, value) if isinstance(value, int | float | str | bool | None) else (kind, id(value))


def _registered(name: str) -> bool:
    return ":" not in name and not name.endswith(".py")
