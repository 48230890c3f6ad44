"""Objects built from the defaults of their class: the `self` of a method, and configurations that a loss takes."""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sized
from dataclasses import dataclass
from typing import Any, get_args

import torch

from kltest.errors import UsageError, did_you_mean
from kltest.loss.arguments import Stub, given_to
from kltest.loss.callables import contents, inner_of, kind_of
from kltest.loss.global_state import preserved
from kltest.names import field_named
from kltest.rollout import Rollout

_DEEPEST = 3
# Packages whose classes are no configurations, however easily they are built.
_NOT_OURS = sys.stdlib_module_names | {"torch", "numpy", "jax", "jaxlib", "jaxtyping", "tensordict", "kltest"}


@dataclass(frozen=True)
class Built:
    """An object built from defaults; `given` are the attributes that `--arg NAME.attribute=value` sets on it."""

    thing: Any
    given: Stub

    def at(self, rollout: Rollout) -> Any:
        """Return the object, its given attributes set, those that are fields ("@beta") from `rollout`."""
        _set(self.thing, self.given.at(rollout))
        return self.thing

    def fields(self) -> set[str]:
        """Return the rollout fields among its given attributes."""
        return self.given.fields()

    @property
    def name(self) -> str:
        return str(vars(self.given)["_stub_name"])

    def note(self) -> str:
        """Return a sentence for the report."""
        changed = ", ".join(f"{self.name}.{name}" for name in given_to(self.given))
        coefficient = next((name for name in contents(self.thing) if field_named(name) == "beta"), None)
        change = f"{coefficient}=@beta grades what it multiplies" if coefficient else "ATTRIBUTE=VALUE changes it"
        rest = f", and {changed} set as given" if changed else f"; --arg {self.name}.{change}"
        return f"{self.name} is {type(self.thing).__name__}(), built from its defaults{rest}."

    def lacks(self, error: BaseException) -> str:
        """Return how to give the attribute that an exception misses on this object, "" for other exceptions."""
        if not isinstance(error, AttributeError) or error.obj is not self.thing:
            return ""
        what = f"{self.name} was built as {type(self.thing).__name__}() and has no {error.name!r}"
        value = f"@{field}" if (field := field_named(error.name)) else "VALUE"
        return f"{what}; give it with --arg {self.name}.{error.name}={value}"


def stand_in(name: str, kind: type, given: Mapping[str, object]) -> Built | Stub:
    """Return an object of a class, built from its defaults; or, where that fails, a stub with its methods."""
    made = build(kind)
    return Stub(name, given, kind) if made is None else Built(made, Stub(name, given))


def configuration(parameter: inspect.Parameter, function: Callable[..., Any], given: Mapping[str, object]) -> Any:
    """Return a Built for a parameter whose annotation is a class that its defaults build, else None.

    A container of data that its defaults leave empty is no configuration.
    """
    kind = annotated(parameter, function)
    made = None if kind is None else build(kind)
    return None if made is None or _is_empty(made) else Built(made, Stub(parameter.name, given))


def _is_empty(thing: Any) -> bool:
    held = contents(thing).values()
    empty = all(value is None or (isinstance(value, Sized) and len(value) == 0) for value in held)
    return empty and (bool(held) or isinstance(thing, Mapping))


def annotated(parameter: inspect.Parameter, function: Callable[..., Any]) -> type | None:
    """Return the class of somebody's own that annotates a parameter, that of the method for `self`; else None.

    Models and classes of torch, NumPy and Python are nobody's configuration.
    """
    hint, inner = parameter.annotation, inner_of(function)
    if parameter.name == "self" and hint is parameter.empty:
        hint = getattr(inner, "__qualname__", "").rpartition(".")[0]
    if isinstance(hint, str):
        try:
            hint = eval(hint, dict(getattr(inner, "__globals__", {})))
        except Exception:  # names that only a type checker knows, or that were not lifted
            return None
    kinds = [kind for kind in get_args(hint) or (hint,) if isinstance(kind, type) and kind is not type(None)]
    if len(kinds) != 1 or kinds[0] is parameter.empty or issubclass(kinds[0], torch.nn.Module):
        return None
    return None if kinds[0].__module__.split(".")[0] in _NOT_OURS else kinds[0]


def build(kind: type, depth: int = _DEEPEST) -> Any:
    """Return an object of a class, given nothing but configurations that are built alike; None if that is impossible.

    What is random in it is the same in every run.
    """
    try:
        given: dict[str, Any] = {}
        for parameter in inspect.signature(kind).parameters.values():
            if parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                needed = annotated(parameter, kind.__init__)  # type: ignore[misc]
                given[parameter.name] = build(needed, depth - 1) if needed is not None and depth else None
                if given[parameter.name] is None or parameter.kind is parameter.POSITIONAL_ONLY:
                    return None
        with preserved(0):
            return kind(**given)
    except KeyboardInterrupt:
        raise
    except BaseException:  # it may need a file, a GPU, command-line arguments: then it is not built
        return None


def _set(thing: Any, given: Stub) -> None:
    """Set the attributes of a stub on an object; objects inside it are copied before that."""
    for name, value in given_to(given).items():
        mapping = isinstance(thing, MutableMapping)
        inner = thing.get(name) if mapping else getattr(thing, name, None)
        if isinstance(value, Stub):
            if inner is not None and not isinstance(inner, Stub):
                stub, value = value, copy.copy(inner)
                _set(value, stub)
        else:
            value = Stub.__getattr__(given, name)
        what = f"--arg {vars(given)['_stub_name']}.{name}=…: {kind_of(thing)}"
        if hasattr(thing, "__dataclass_fields__") and not hasattr(thing, name):
            raise UsageError(f"{what} has no {name!r}; {did_you_mean(name, thing.__dataclass_fields__)}".rstrip("; "))
        try:
            if mapping:
                thing[name] = value
            else:
                object.__setattr__(thing, name, value)  # it may be frozen, or a module's parameter
        except (AttributeError, TypeError) as error:
            raise UsageError(f"{what} does not let it be set: {error}") from error
