"""Objects that fill parameters: the `self` of a method and configurations, built from the defaults of their class.

Where a class cannot be built, a stand-in has the attributes that `--arg` gives, and the methods of the class.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sized
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch

from kltest.errors import UsageError, did_you_mean
from kltest.loss.arguments import Attributes, FieldOf, argument_for
from kltest.loss.callables import contents, inner_of, kind_of, required
from kltest.loss.derived import Derived
from kltest.loss.global_state import preserved
from kltest.names import field_named
from kltest.rollout import NotGivenError, Rollout

_DEEPEST = 3
# Packages whose classes are no configurations, however easily they are built.
_NOT_OURS = sys.stdlib_module_names | {"torch", "numpy", "jax", "jaxlib", "jaxtyping", "tensordict", "kltest"}


class StandIn:
    """An object that has the attributes set on it, those of a class, and no others.

    Methods, properties and constants of the class work, with the stand-in as their `self`. What is set can be read by
    key as well, as from a dictionary.
    """

    __slots__ = ("__dict__", "_stand_in_kind", "_stand_in_name")

    def __init__(self, name: str, kind: type | None = None) -> None:
        self._stand_in_name, self._stand_in_kind = name, kind

    def __getattr__(self, attribute: str) -> Any:
        kind = self._stand_in_kind
        found = None if kind is None else inspect.getattr_static(kind, attribute, None)
        if found is not None:
            return found.__get__(self, kind) if hasattr(found, "__get__") else found
        # These are no methods, since the class may have its own of these names.
        if attribute in ("get", "keys"):
            return partial(getattr(dict, attribute), vars(self))
        raise self._not_given(attribute)

    def __getitem__(self, key: Any) -> Any:
        if key not in vars(self):
            raise self._not_given(key)
        return vars(self)[key]

    def __setitem__(self, key: str, value: object) -> None:
        vars(self)[key] = value

    def __contains__(self, key: object) -> bool:
        return key in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def _not_given(self, what: object) -> NotGivenError:
        name = self._stand_in_name
        known = isinstance(what, str) and what.isidentifier()
        advice = f"give it with {argument_for(f'{name}.{what}')}" if known else "--arg can give it names alone"
        return NotGivenError(f"{name} stands in for an object that was not built and has no {what!r}; {advice}")


@dataclass(frozen=True)
class ObjectOf:
    """An object that fills a parameter.

    Attributes:
        name: The parameter.
        given: The attributes that are set on it in each call.
        built: The object, None if one stands in for it. That is made anew for each call, so that what a loss writes on
            it ends with the call.
        kind: The class that a stand-in has its methods from.
    """

    name: str
    given: Attributes
    built: Any = None
    kind: type | None = None

    def at(self, rollout: Rollout) -> Any:
        """Return the object for a call, its given attributes set, those that are fields from `rollout`."""
        made = StandIn(self.name, self.kind) if self.built is None else self.built
        if any(isinstance(value, Derived) for value in self.given.values()):
            made = copy.copy(made)  # it has another value in each call, which is no state that it keeps
        _set(made, self.name, self.given, rollout)
        return made

    def with_attribute(self, name: str, value: object) -> "ObjectOf":
        """Return the same with a value for one attribute, by its dotted name; the object itself is left alone."""
        return replace(self, given=self.given.with_value(name, value), built=copy.copy(self.built))

    @property
    def stated(self) -> dict[str, object]:
        """The values of its attributes, and of those of objects of somebody's own inside it, by dotted names."""
        return dict(_stated(self.built, self.given, self.name, _DEEPEST))

    def note(self) -> str:
        """Return a sentence for the report on an object that was built."""
        changed = ", ".join(f"{self.name}.{name}" for name in self.given)
        coefficient = next((name for name in contents(self.built) if field_named(name) == "beta"), None)
        change = f"{coefficient}=@beta grades what it multiplies" if coefficient else "ATTRIBUTE=VALUE changes it"
        rest = f", and {changed} set as given" if changed else f"; --arg {self.name}.{change}"
        return f"{self.name} is {type(self.built).__name__}(), built from its defaults{rest}."

    def lacks(self, error: BaseException) -> str:
        """Return how to give the attribute that an exception misses on a built object, "" for other exceptions."""
        if self.built is None or not isinstance(error, AttributeError) or error.obj is not self.built:
            return ""
        what = f"{self.name} was built as {type(self.built).__name__}() and has no {error.name!r}"
        return f"{what}; give it with {argument_for(f'{self.name}.{error.name}')}"


def _stated(thing: Any, given: Attributes, path: str, depth: int) -> Iterator[tuple[str, object]]:
    held = contents(thing)
    for name in dict.fromkeys([*held, *given]):
        value, inner = given.get(name, held.get(name)), given.get(name, Attributes())
        if name in held and isinstance(inner, Attributes) and _is_ours(held[name]) and depth:
            yield from _stated(held[name], inner, f"{path}.{name}", depth - 1)
        else:
            yield f"{path}.{name}", value


def _is_ours(thing: Any) -> bool:
    """Return True for an object of a class that is neither torch's, NumPy's nor Python's, and for a namespace."""
    return isinstance(thing, SimpleNamespace) or type(thing).__module__.split(".")[0] not in _NOT_OURS


def _set(thing: Any, path: str, given: Attributes, rollout: Rollout) -> None:
    """Set attributes on an object; objects inside it are copied before that."""
    mapping = isinstance(thing, MutableMapping)
    for name, attribute in given.items():
        value = _value_of(attribute, thing, path, name, rollout)
        what = f"--arg {path}.{name}=…: {kind_of(thing)}"
        if hasattr(thing, "__dataclass_fields__") and not hasattr(thing, name):
            raise UsageError(f"{what} has no {name!r}; {did_you_mean(name, thing.__dataclass_fields__)}".rstrip("; "))
        try:
            if mapping:
                thing[name] = value
            else:
                object.__setattr__(thing, name, value)  # it may be frozen, or a module's parameter
        except (AttributeError, TypeError) as error:
            raise UsageError(f"{what} does not let it be set: {error}") from error


def _value_of(attribute: Any, thing: Any, path: str, name: str, rollout: Rollout) -> Any:
    if isinstance(attribute, FieldOf | Derived):
        return attribute.at(rollout)
    if not isinstance(attribute, Attributes):
        return attribute
    inner = None
    if not isinstance(thing, StandIn):
        inner = thing.get(name) if isinstance(thing, MutableMapping) else getattr(thing, name, None)
    # Its stand-in of an earlier call is made anew.
    inner = StandIn(f"{path}.{name}") if inner is None or isinstance(inner, StandIn) else copy.copy(inner)
    _set(inner, f"{path}.{name}", attribute, rollout)
    return inner


def configuration(
    parameter: inspect.Parameter, function: Callable[..., Any], given: Attributes | None = None
) -> ObjectOf | None:
    """Return the object for a parameter whose annotation is a class that its defaults build, else None.

    A container of data that its defaults leave empty is no configuration.
    """
    kind = annotated(parameter, function)
    made = None if kind is None else build(kind)
    return None if made is None or _is_empty(made) else ObjectOf(parameter.name, given or Attributes(), made)


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
            hint = eval(hint, getattr(inner, "__globals__", {}))
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
        for parameter in required(kind):
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
