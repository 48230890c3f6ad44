"""Filling the parameters of a loss: with a field of the same name, an argument, or an object."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kltest.errors import UsageError
from kltest.loss import supports
from kltest.loss.advice import advice
from kltest.loss.arguments import Attributes, FieldOf, SizeOf, SupportOf, fields_listed, parsed
from kltest.loss.building import ObjectOf, annotated, configuration
from kltest.loss.derived import DERIVED, Derived
from kltest.loss.outcome import Call
from kltest.loss.view import RolloutView
from kltest.names import (
    BATCH_SIZES,
    GROUP_SIZES,
    SUPPORT_SIZE,
    field_named,
    near_spelling,
    payloads,
    suggested_field,
    training_step,
)
from kltest.rollout import fields_behind

FEWER = ", or the vocabulary less two if that is fewer"
Filling = FieldOf | ObjectOf | Derived | SizeOf | Any


@dataclass(frozen=True)
class Arguments:
    """Arguments for the parameters of a callable in each call; `receiver` is the `self` of a plain method."""

    parameters: tuple[inspect.Parameter, ...]
    fillings: Mapping[str, Filling]
    receiver: ObjectOf | None = None

    @property
    def _objects(self) -> list[ObjectOf]:
        return [one for one in (self.receiver, *self.fillings.values()) if isinstance(one, ObjectOf)]

    @cached_property
    def fields(self) -> dict[str, str]:
        """The field that fills each parameter."""
        return {key: filling.name for key, filling in self.fillings.items() if isinstance(filling, FieldOf)}

    @cached_property
    def takes(self) -> frozenset[str]:
        """The fields that are given, as attributes of objects as well."""
        named = [*self.fields.values(), *(name for one in self._objects for name in one.given.fields())]
        return frozenset().union(*map(fields_behind, named))

    @cached_property
    def support(self) -> SupportOf | None:
        """The tokens that it distinguishes: how many, and whose likeliest; None if it states none."""
        return supports.distinguished(self.fillings, {one.name: one for one in self.parameters})

    @cached_property
    def built(self) -> list[ObjectOf]:
        """The objects that were built from the defaults of their class."""
        return [one for one in self._objects if one.built is not None]

    @property
    def filled(self) -> dict[str, str]:
        """What each parameter gets, in words; of one that keeps its default, that."""
        found = {}
        for parameter in self.parameters:
            name, kept = parameter.name, parameter.default
            filling = self.fillings.get(name, kept)
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name not in self.fillings:
                found[name] = f"its default, {_in_words(kept)}"
            elif isinstance(filling, SupportOf):
                side, fewer = "reference" if filling.of else "policy", FEWER if filling.k > SUPPORT_SIZE else ""
                found[name] = f"{filling.name}, the {filling.k} likeliest of the {side}{fewer}"
            elif isinstance(filling, FieldOf | Derived):
                words = filling.words if isinstance(filling, FieldOf) else DERIVED[filling.name][0]
                found[name] = words + (
                    "" if kept is parameter.empty else f" in place of its default, {_in_words(kept)}"
                )
            elif isinstance(filling, SizeOf):
                found[name] = f"{filling.k}{FEWER}"
            else:
                found[name] = "an object" if isinstance(filling, ObjectOf) else repr(filling)
        return found

    @property
    def group_size(self) -> tuple[str, int] | None:
        """The parameter, or the attribute of an object, that says how many rollouts a group has, and how many."""
        for name, size in self.stated.items():
            if name.split(".")[-1] in GROUP_SIZES and type(size) is int and size > 1:
                return name, size
        return None

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The numbers that say how many rows a batch has and that nobody gave, by parameter or attribute."""
        given = {*self.fillings, *(f"{one.name}.{name}" for one in self.built for name in one.given)}
        return {
            name: size
            for name, size in self.stated.items()
            if name.split(".")[-1] in BATCH_SIZES and type(size) is int and size > 1 and name not in given
        }

    @property
    def stated(self) -> dict[str, object]:
        """The values of all parameters that no field fills, and of the attributes of objects, by dotted names."""
        values = {one.name: self.fillings.get(one.name, one.default) for one in self.parameters}
        for one in self.built:
            values |= one.stated
        return values

    def without(self, names: Collection[str]) -> "Arguments":
        """Return the same with the defaults of these parameters."""
        return replace(self, fillings={key: filling for key, filling in self.fillings.items() if key not in names})

    def with_support(self, k: int) -> "Arguments":
        """Return the same with supports of k tokens."""
        sized = {key: replace(one, k=k) for key, one in self.fillings.items() if isinstance(one, SupportOf | SizeOf)}
        return replace(self, fillings={**self.fillings, **sized})

    def with_value(self, name: str, value: object) -> "Arguments":
        """Return the same with a value for one parameter, or for one attribute of an object, by its dotted name."""
        whose, _, attribute = name.partition(".")
        if not attribute:
            return replace(self, fillings={**self.fillings, name: value})
        changed = next(one for one in self._objects if one.name == whose).with_attribute(attribute, value)
        if self.receiver and self.receiver.name == whose:
            return replace(self, receiver=changed)
        return replace(self, fillings={**self.fillings, whose: changed})

    def of(self, view: RolloutView) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the named arguments of one call."""
        named = {key: _value_of(filling, view) for key, filling in self.fillings.items()}
        positional = [] if self.receiver is None else [self.receiver.at(view)]
        for parameter in self.parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                # One that keeps its default is passed all the same, since a filled one may follow it.
                positional.append(named.pop(parameter.name, parameter.default))
        return positional, named


def _value_of(filling: Filling, view: RolloutView) -> Any:
    return filling.at(view) if isinstance(filling, FieldOf | ObjectOf | Derived | SizeOf) else filling


def fill(
    name: str, parameters: list[inspect.Parameter], call: Call, function: Callable[..., Any]
) -> dict[str, Filling]:
    """Return the filling of each parameter; those that keep their default are left out.

    Raises UsageError that names all parameters that nothing fills, or an argument that no parameter takes.
    """
    fillings: dict[str, Filling] = parsed(call.arguments)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    fillable = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    support = supports.stated(fillable, fillings)
    if not open_ended and (unknown := fillings.keys() - fillable.keys()):
        raise _no_such_parameter(name, min(unknown), list(fillable))
    if not fillable and not fillings and parameters:
        raise UsageError(
            f"{name} takes {_shown(parameters)} and names no parameter, so nothing says what to give it. "
            f"Wrap it in a function with named parameters{', or use --arg NAME=@FIELD' if open_ended else ''}; "
            f"fields are {fields_listed()}"
        )
    for key, given in fillings.items():
        if isinstance(given, Attributes):
            made = configuration(fillable[key], function, given) if key in fillable else None
            fillings[key] = made or ObjectOf(key, given)
    missing: dict[str, str] = {}
    spared = _other_coefficients(fillable, fillings)
    for key, parameter in fillable.items():
        if key in fillings or key in spared:
            continue
        field = None if _another_model(key, fillable) else field_named(key)
        if field:
            fillings[key] = FieldOf(field)
        elif parameter.default is parameter.empty and key in DERIVED:
            fillings[key] = Derived(key)
        elif parameter.default is parameter.empty and (step := training_step(key)) is not None:
            fillings[key] = step  # others are tried by `kltest.checks.cuts`
        elif parameter.default is parameter.empty:
            if made := configuration(parameter, function):
                fillings[key] = made
            else:
                kind = annotated(parameter, function)
                missing[key] = f"{kind.__name__} is not built by its defaults" if kind else ""
    if any(isinstance(one, FieldOf) and one.name == "logits" for one in fillings.values()):
        paired = payloads(missing)
        fillings |= {key: SupportOf(field, SUPPORT_SIZE, "ref_") for key, field in paired.items()}
        missing = {key: why for key, why in missing.items() if key not in paired}
    if missing and (guessed := _only_guesses(missing, fillable)):
        fillings |= {key: FieldOf(field) for key, field in guessed.items()}
    elif missing:
        raise _cannot_fill(name, missing, parameters, function)
    return supports.filled(fillings, fillable, support)


def _another_model(key: str, fillable: Mapping[str, inspect.Parameter]) -> bool:
    """Return True for a teacher's parameter beside one of the reference: two models, of which a rollout has one."""
    same = [other for other in fillable if field_named(other) == field_named(key)]
    return "teacher" in key and not all("teacher" in other for other in same)


def _other_coefficients(fillable: Mapping[str, inspect.Parameter], given: Mapping[str, Filling]) -> set[str]:
    """Return the parameters of several coefficients that are not β: given a number, or with 0 for a default.

    If no other is left, β is the first number that was given and is not 0, or else the first that was not given.
    """
    coefficients = [key for key in fillable if field_named(key) == "beta"]
    if len(coefficients) < 2:
        return set()
    value = {key: given.get(key, fillable[key].default) for key in coefficients}
    own = [key for key in coefficients if key not in given]
    beta = [key for key in own if value[key] not in (0, None)]
    return set(coefficients) - set(beta or [key for key in given if value.get(key)][:1] or own[:1])


def _only_guesses(missing: Mapping[str, str], fillable: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Return the field that each parameter seems to mean; nothing unless each means one, and no two the same."""
    guessed = {key: field for key in missing if (field := suggested_field(key)) and not missing[key]}
    taken = {field_named(key) for key in fillable}
    alone = len(guessed) == len(missing) == len({*guessed.values()}) and not taken & {*guessed.values()}
    return guessed if alone else {}


def _cannot_fill(
    name: str, missing: Mapping[str, str], parameters: list[inspect.Parameter], function: Callable[..., Any]
) -> UsageError:
    """Name all parameters that nothing fills; `missing` gives for each why not, if there is something to say."""
    taken = {field_named(parameter.name) for parameter in parameters}
    near = {
        parameter: field
        for parameter in missing
        if (field := suggested_field(parameter)) is not None and field not in taken
    }
    guesses = [f"did you mean {field}, --arg {parameter}=@{field}?" for parameter, field in near.items()]
    hints = "; ".join([*guesses, *filter(None, missing.values())])
    words = list(map(repr, missing))
    which = f"parameters {', '.join(words[:-1])} and {words[-1]}" if words[1:] else f"parameter {words[0]}"
    own = "NAME" if words[1:] else next(iter(missing))
    proposal = advice(function, missing).rstrip()
    lines = [
        f"the {which} of {name}({_shown(parameters)}) cannot be filled{hints and f' ({hints})'}. {proposal}".rstrip(),
        f"{'Or give' if proposal else 'Give'} {'each' if words[1:] else 'it'} a value with --arg {own}=VALUE, a field "
        f"with --arg {own}=@FIELD, or an object's attributes with --arg {own}.ATTRIBUTE=VALUE; "
        f'in Python with arguments={{"{own}": VALUE}}, which takes "@FIELD" and "{own}.ATTRIBUTE" too.',
        "`kltest list fields` has the fields, and the names of parameters that are filled by themselves.",
    ]
    return UsageError("\n".join(lines))


def _no_such_parameter(name: str, argument: str, names: list[str]) -> UsageError:
    near = near_spelling(argument, names)
    hint = f"did you mean {near!r}?" if near else f"its parameters are {', '.join(names) or 'none'}"
    if argument == "self":
        hint = "--arg self.NAME=VALUE is for methods that are named through their class (Class.method)"
    return UsageError(f"--arg {argument}=…: {name} has no parameter of that name; {hint}")


def _shown(parameters: list[inspect.Parameter]) -> str:
    bare = [p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...) for p in parameters]
    return ", ".join(str(parameter).replace("Ellipsis", "…") for parameter in bare)


def fixed_beta(fillings: dict[str, Filling], call: Call) -> float | None:
    """Return the β that was asked for: by option, or as a number for the parameter that β fills.

    Of several coefficients a number is that parameter's own, if another one is β.
    """
    asked = call.beta
    another = any(isinstance(filling, FieldOf) and filling.name == "beta" for filling in fillings.values())
    several = sum(field_named(key) == "beta" for key in fillings) > 1
    for key, filling in fillings.items():
        if another or field_named(key) != "beta" or isinstance(filling, bool):
            continue
        if isinstance(filling, int | float) and (filling or not several):
            asked, fillings[key] = float(filling), FieldOf("beta")
            another = True
    if asked is not None and (asked == 0 or not math.isfinite(asked)):
        raise UsageError(f"β must be a finite number other than 0, not {asked}, else there is no KL term to grade")
    return asked


def _in_words(default: Any) -> str:
    """A default in words that are the same in each run: of an object without any, its type."""
    text = repr(default)
    return type(default).__name__ if f"{id(default):x}" in text.lower() else text
