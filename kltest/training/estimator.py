"""Binding of a run's estimator, and the sets of runs that can share its calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kltest.errors import UsageError
from kltest.estimators import registry
from kltest.loss.calling import Loss, bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.training.problems import PerRun, Run


def bound(run: Run) -> Loss:
    """Bind the run's estimator, a number in place of each PerRun. Raises UsageError if it cannot be called."""
    options = {name: 0.5 if isinstance(value, PerRun) else value for name, value in run.options.items()}
    call = Call(run.placement, run.credit, None, options)
    if isinstance(run.estimator, str):
        loss = resolve(run.estimator, call)
    else:
        assert run.estimator is not None
        name = getattr(run.estimator, "__qualname__", type(run.estimator).__name__)
        spec = next((entry.spec for entry in registry().values() if entry.function is run.estimator), None)
        loss = bind(run.estimator, call, name, spec=spec)
    if options != run.options and not is_built_in(loss):
        raise UsageError(f"{loss.name}: a PerRun option is for the estimators of kltest")
    return loss


def is_built_in(loss: Loss) -> bool:
    """True for an estimator of this package, whose SPEC is tested."""
    return loss.spec is not None and getattr(loss.function, "__module__", "").startswith("kltest.estimators.")


def sharing(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of the runs, grouped into those whose estimator can be called for all of them at once."""
    takes_beta: dict[Hashable, bool] = {}
    together: dict[Hashable, list[int]] = {}
    for row, run in enumerate(runs):
        same = _likeness(run)
        if same not in takes_beta:
            takes = frozenset() if run.estimator is None else bound(run).takes
            # A function that takes β may not accept a tensor of them.
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
