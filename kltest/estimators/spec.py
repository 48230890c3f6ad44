"""What an estimator says of itself, and the table of all of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pkgutil import iter_modules
from typing import Any, Literal

from kltest.errors import UsageError

Placement = Literal["loss", "reward", "both"]
Credit = Literal["return", "to-go", "immediate"]
Combination = Mapping[str, float]


@dataclass(frozen=True)
class Spec:
    """An estimator's description; everything that is listed, documented or tested about it renders from here.

    `identified[sampler][world]` is the combination of named gradients that its expected gradient equals, or None where
    nothing is to be named; worlds are bandit, sequence, ragged and mdp, and "tokens" stands for the last three.
    `per_token` says that its term for a token depends on that token's fields alone, so that dynamic programming can
    take its expectation. `off_policy_only`: it means something only when the sampler is not the policy.
    """

    name: str
    formula: str
    source: str
    placement: Placement
    claims: str
    known_false: str
    identified: Mapping[str, Mapping[str, Combination | None]]
    aliases: tuple[str, ...] = ()
    credit: Credit = "return"
    per_token: bool = False
    off_policy_only: bool = False
    couples: bool = False

    def expectation(self, world: str, sampler: str) -> Combination | None:
        """The combination that this estimator is to be identified as, or None."""
        row = self.identified[sampler]
        return row[world] if world in row else row["tokens"]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator: its description and the function that computes it."""

    spec: Spec
    function: Callable[..., Any] = field(compare=False)


_REGISTRY: dict[str, Estimator] = {}
_LOADED: set[str] = set()
ENTRY_POINT_GROUP = "kltest.estimators"


def register(spec: Spec) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that puts a function into the table under `spec.name` and its aliases.

    Raises UsageError if a name is taken by another estimator.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in (spec.name, *spec.aliases):
            owner = _owner(name)
            if owner is not None and owner != spec.name:
                raise UsageError(f"cannot register {spec.name!r}: the name {name!r} belongs to {owner!r}")
        _REGISTRY[spec.name] = Estimator(spec, function)
        return function

    return decorate


def _owner(name: str) -> str | None:
    return next((key for key, entry in _REGISTRY.items() if name == key or name in entry.spec.aliases), None)


def registry() -> dict[str, Estimator]:
    """All estimators by name, in alphabetical order: this package's, and those of installed entry points."""
    if "package" not in _LOADED:
        _LOADED.add("package")
        package = import_module("kltest.estimators")
        for module in iter_modules(package.__path__):
            import_module(f"kltest.estimators.{module.name}")
        for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
            entry.load()
    return dict(sorted(_REGISTRY.items()))


def find(name: str) -> Estimator:
    """The estimator of that name or alias; UsageError with the nearest names otherwise."""
    known = registry()
    wanted = name.lower().replace("_", "-")
    for candidate in (name, wanted):
        owner = _owner(candidate)
        if owner is not None:
            return known[owner]
    names = [*known, *(alias for entry in known.values() for alias in entry.spec.aliases)]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`kltest list` shows them all."
    raise UsageError(f"there is no estimator called {name!r}; {hint}")
