"""A run's estimator made ready to be called, and which runs can share its calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from kltest.errors import UsageError
from kltest.estimators import find, registry
from kltest.loss.calling import BoundLoss, bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.training.problems import PerRun, Run


class Held:
    """A function whose parameters `own` are held back and filled from `columns`, which change from call to call."""

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


def made_ready(run: Run) -> BoundLoss:
    """The run's estimator, what is its own for each run held back. Raises UsageError for what cannot be called."""
    plain = {name: value for name, value in run.options.items() if not isinstance(value, PerRun)}
    own = [name for name in run.options if name not in plain]
    call = Call(run.placement, run.credit, None, plain)
    if isinstance(run.estimator, str) and not _registered(run.estimator):
        if own:
            raise UsageError(f"{run.estimator}: a PerRun option is for registered estimators and for callables")
        return resolve(run.estimator, call)
    if isinstance(run.estimator, str):
        estimator = find(run.estimator)
        function, name, spec = estimator.function, estimator.spec.name, estimator.spec
    else:
        assert run.estimator is not None
        function, name = run.estimator, getattr(run.estimator, "__qualname__", type(run.estimator).__name__)
        known = [entry.spec for entry in registry().values() if entry.function is function]
        return bind(Held(function, own, name) if own else function, call, name, spec=known[0] if known else None)
    return bind(Held(function, own, name) if own else function, call, name, spec=spec)


def is_ours(loss: BoundLoss) -> bool:
    """Whether the estimator is one of this package's own, tested to be what its SPEC says."""
    function = loss.function
    function = function.function if isinstance(function, Held) else function
    return loss.spec is not None and getattr(function, "__module__", "").startswith("kltest.estimators.")


def sharing(runs: Sequence[Run]) -> list[list[int]]:
    """The rows of the runs, those together whose estimator can be called for all of them at once.

    A function that takes β is called for one β at a time, since nothing says how it would combine a tensor of them.
    """
    takes_beta: dict[Hashable, bool] = {}
    together: dict[Hashable, list[int]] = {}
    for row, run in enumerate(runs):
        same = _likeness(run)
        if same not in takes_beta:
            takes = frozenset() if run.estimator is None else made_ready(run).takes
            takes_beta[same] = bool(takes & {"beta", "rollout"})
        together.setdefault((same, run.beta if takes_beta[same] else None), []).append(row)
    return list(together.values())


def _likeness(run: Run) -> Hashable:
    """Equal for runs that ask for the same function in the same way."""
    estimator = run.estimator if run.estimator is None or isinstance(run.estimator, str) else id(run.estimator)
    options = tuple((name, *_same(value)) for name, value in sorted(run.options.items()))
    return estimator, run.placement, run.credit, run.whole, options


def _same(value: Any) -> tuple[Hashable, ...]:
    """What makes two values of an option the same; numbers of PerRun always are."""
    if isinstance(value, PerRun):
        return ("PerRun", id(value.value)) if callable(value.value) else ("PerRun",)
    # 1, 1.0 and True are equal, and a function may tell them apart.
    kind = type(value).__name__
    return (kind, value) if isinstance(value, int | float | str | bool | None) else (kind, id(value))


def _registered(name: str) -> bool:
    return ":" not in name and not name.endswith(".py")
