"""Arguments given by name: fields of the rollout, and stand-in objects that dotted names build."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from kltest.errors import UsageError
from kltest.names import FIELDS, field_named
from kltest.rollout import NotGivenError, Rollout


def field_asked(value: object) -> str | None:
    """Return the field that a value "@name" stands for, None for an ordinary value; UsageError if there is none."""
    if not (isinstance(value, str) and value.startswith("@")):
        return None
    name = field_named(value[1:])
    if name is None:
        raise UsageError(f"{value!r} is no field of a rollout; the fields are {fields_listed()}")
    return name


def fields_listed() -> str:
    """Return the fields as they are written in an argument, for messages."""
    return ", ".join(f"@{name}" for name in FIELDS)


class Stub:
    """An object that has the attributes given by `--arg NAME.attribute=value`, those of its class, and no others.

    If a method of a class is graded, the stub is its `self`: methods, properties and constants of the class work,
    with the stub as their `self`. Fields ("@beta") are read from the rollout of the present call. What is given can be
    read by key as well, so that a stub can stand in for a dictionary.
    """

    def __init__(self, name: str, attributes: Mapping[str, object], kind: type | None = None) -> None:
        given, deeper = split_dotted(attributes)
        given.update({head: Stub(f"{name}.{head}", inner) for head, inner in deeper.items()})
        for value in given.values():
            field_asked(value)
        vars(self).update(_stub_name=name, _stub_given=given, _stub_kind=kind, _stub_rollout=None)

    def __getattr__(self, attribute: str) -> Any:
        given, kind = vars(self)["_stub_given"], vars(self)["_stub_kind"]
        if attribute in given:
            value = given[attribute]
            asked = field_asked(value)
            return value if asked is None else getattr(vars(self)["_stub_rollout"], asked)
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)
        found = inspect.getattr_static(kind, attribute, None) if kind is not None else None
        if found is not None:
            return found.__get__(self, kind) if hasattr(found, "__get__") else found
        if attribute in _OF_A_DICTIONARY:
            return partial(_OF_A_DICTIONARY[attribute], self)
        raise self._not_given(attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        vars(self)["_stub_given"][attribute] = value

    def __getitem__(self, key: object) -> Any:
        if key not in self:
            raise self._not_given(key)
        return getattr(self, str(key))

    def __setitem__(self, key: str, value: object) -> None:
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return key in vars(self)["_stub_given"]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self)["_stub_given"])

    def _not_given(self, what: object) -> NotGivenError:
        name = vars(self)["_stub_name"]
        known = isinstance(what, str) and what.isidentifier()
        value = f"@{field}" if (field := field_named(what)) else "VALUE"
        advice = f"give it with --arg {name}.{what}={value}" if known else "--arg can give it names alone"
        return NotGivenError(f"{name} stands in for an object that was not built and has no {what!r}; {advice}")

    def fields(self) -> set[str]:
        """Return the rollout fields among its attributes, at any depth."""
        inner = [
            value.fields() if isinstance(value, Stub) else {field_asked(value)} for value in given_to(self).values()
        ]
        return {name for names in inner for name in names if name is not None}

    def at(self, rollout: Rollout) -> "Stub":
        """Return a copy that reads its fields from `rollout`; what a loss writes on it ends with the call."""
        copy = object.__new__(Stub)
        given = {
            name: value.at(rollout) if isinstance(value, Stub) else value for name, value in given_to(self).items()
        }
        vars(copy).update(vars(self), _stub_given=given, _stub_rollout=rollout)
        return copy


def given_to(stub: Stub) -> dict[str, object]:
    """Return the attributes that `--arg` gave a stub. No method, since its class may have one so named."""
    return dict(vars(stub)["_stub_given"])


def _get(stub: Stub, key: object, default: Any = None) -> Any:
    return stub[key] if key in stub else default  # noqa: SIM401


# These are no methods, since the class of an object may have its own of these names.
_OF_A_DICTIONARY: dict[str, Callable[..., Any]] = {"get": _get, "keys": list}


def split_dotted(arguments: Mapping[str, object]) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Return the plain arguments, and for each head of a dotted name the attributes given for it."""
    plain: dict[str, object] = {}
    dotted: dict[str, dict[str, object]] = {}
    for name, value in arguments.items():
        head, dot, rest = name.partition(".")
        if dot:
            dotted.setdefault(head, {})[rest] = value
        else:
            plain[name] = value
    if both := plain.keys() & dotted.keys():
        name = sorted(both)[0]
        raise UsageError(f"--arg gives both {name} and {name}.{next(iter(dotted[name]))}; give one of the two")
    return plain, dotted
