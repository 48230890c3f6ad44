"""Descriptions of estimators (SPEC) and the registry of all of them.

A user's own estimator joins the table when its module is imported: by hand, or because an installed distribution
names that module as an entry point in the group `kltest.estimators`:

    @register(Spec(name="my-kl", formula="Σ_t u_t²", source="…", placement="loss", claims="…", known_false="…"))
    def my_kl(logp, ref_logp): ...
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from pkgutil import iter_modules
from typing import Any, Literal, get_args

from kltest.errors import UsageError, did_you_mean

Place = Literal["loss", "reward", "both"]
Placement = Literal["loss", "reward", "shaped-reward", "both"]
"""A shaped reward is what is left of a reward after a penalty, higher being better: the negative of a cost."""
Credit = Literal["return", "to-go", "immediate"]
Combination = Mapping[str, float]
Row = Mapping[str, Combination | None]
ENVIRONMENTS = ("bandit", "sequence", "ragged", "mdp")
SAMPLERS = ("current", "stale", "engine")
Part = Literal["kl", "policy"]


def everywhere(combination: Combination | None) -> Mapping[str, Combination | None]:
    """Return the row of `Spec.identified` that says the same of a bandit and of tokens; None: unnamed."""
    return {"bandit": combination, "tokens": combination}


UNNAMED = everywhere(None)


def local(name: str, coefficient: float = 1.0, at: str = "") -> Mapping[str, Combination | None]:
    """Return the row of a gradient on a bandit and of its next-token part on tokens, with prefixes `at` a sampler."""
    return {"bandit": {name: coefficient}, "tokens": {f"local_{name}{at}": coefficient}}


@dataclass(frozen=True)
class Spec:
    """Description of an estimator, from which its listing, documentation and tests are made.

    `identified[sampler][environment]` is the combination of named gradients that its expected gradient equals, or None
    if it is unnamed. Environments are bandit, sequence, ragged and mdp; "tokens" stands for the last three.
    Coefficients that depend on the length are those of T = 3. An entry left out is unspecified; kltest's own estimators
    fill in both samplers.
    `per_token` means that its term for a token depends on that token's fields alone, so that dynamic programming gives
    its expectation. `off_policy_only` means that it differs from others only if the sampler is not the policy.
    `couples` means that it is one number for a batch that is not a mean over its rows.
    `part` is "kl" for a KL term, to be minimised; "policy" for a policy loss, of which the direction that it ascends is
    identified.

    Raises UsageError if the name, placement, credit, a sampler or an environment is invalid.
    """

    name: str
    formula: str
    source: str
    placement: Placement
    claims: str
    known_false: str
    identified: Mapping[str, Mapping[str, Combination | None]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    credit: Credit = "return"
    per_token: bool = False
    off_policy_only: bool = False
    couples: bool = False
    part: Part = "kl"

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise UsageError(f"the SPEC of estimator {self.name!r}: {problem}")

    def _problems(self) -> Iterator[str]:
        if not self.name or _normal(self.name) != self.name or any(character.isspace() for character in self.name):
            yield "a name is in lower case, with hyphens and without spaces"
        for what, kinds in (("placement", get_args(Placement)), ("credit", get_args(Credit)), ("part", get_args(Part))):
            if (value := getattr(self, what)) not in kinds:
                yield f"{what} {value!r} is none of {', '.join(kinds)}"
        for sampler, row in sorted(self.identified.items()):
            if sampler not in SAMPLERS:
                yield f"identified[{sampler!r}]: samplers are {', '.join(SAMPLERS)}"
            for name, combination in sorted(row.items()):
                if name not in (*ENVIRONMENTS, "tokens"):
                    yield f"identified[…][{name!r}]: environments are {', '.join(ENVIRONMENTS)}, or tokens"
                if combination == {}:
                    yield f"identified[…][{name!r}] is empty: say {{'zero': 1.0}} for no gradient, None for unnamed"

    def expectation(self, environment: str, sampler: str) -> Combination | None:
        """Return the combination that this estimator must be identified as, or None."""
        row = self.identified.get(sampler, {})
        return row[environment] if environment in row else row.get("tokens" if environment != "bandit" else "bandit")


@dataclass(frozen=True)
class Estimator:
    """A registered estimator: its description and the function that computes it."""

    spec: Spec
    function: Callable[..., Any] = field(compare=False)


_REGISTRY: dict[str, Estimator] = {}
ENTRY_POINT_GROUP = "kltest.estimators"


def register(spec: Spec) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function under `spec.name` and its aliases.

    Raises UsageError if a name is taken by another estimator.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not getattr(function, "__module__", "").startswith("kltest.estimators."):
            _load_package()  # so that a clash of names is the newcomer's
        for name in (spec.name, *spec.aliases):
            owner = _owner(name)
            if owner is not None and not (owner == spec.name and _same(function, _REGISTRY[owner].function)):
                raise UsageError(f"cannot register {spec.name!r}: the name {name!r} belongs to {owner!r}")
        _REGISTRY[spec.name] = Estimator(spec, function)
        return function

    return decorate


def policy_loss(
    name: str, current: Row, stale: Row = UNNAMED, engine: Row | None = None, **described: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a policy loss; the rows say what it ascends under each sampler."""
    rows = {"current": current, "stale": stale, **({"engine": engine} if engine else {})}
    return register(Spec(name, placement="loss", identified=rows, part="policy", **described))


def registry(part: Part | None = "kl") -> dict[str, Estimator]:
    """Return the estimators by name, alphabetically: of this package, of entry points, and of imported modules.

    An entry point that cannot be loaded is left out with a warning.

    Args:
        part: "kl" for the KL terms, "policy" for the policy losses, None for both.
    """
    _load_package()
    _load_entry_points()
    return {name: entry for name, entry in sorted(_REGISTRY.items()) if part in (None, entry.spec.part)}


def find(name: str) -> Estimator:
    """Return the estimator with a name or alias. Raises UsageError, with the nearest names, if there is none."""
    known = registry(None)
    if (owner := _owner(name)) is not None:
        return known[owner]
    names = [label for entry in known.values() for label in (entry.spec.name, *entry.spec.aliases)]
    hint = did_you_mean(_normal(name), names).strip() or "`kltest list` shows them all."
    raise UsageError(f"there is no estimator called {name!r}; {hint}")


@cache
def _load_package() -> None:
    for module in iter_modules(import_module("kltest.estimators").__path__):
        import_module(f"kltest.estimators.{module.name}")


@cache
def _load_entry_points() -> None:
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            warnings.warn(
                f"the estimators of entry point {entry.name!r} ({entry.value}) are left out: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )


def _owner(name: str) -> str | None:
    wanted = _normal(name)
    return next((key for key, entry in _REGISTRY.items() if wanted in (key, *map(_normal, entry.spec.aliases))), None)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """True for the same function, its module perhaps executed twice."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
