"""Arguments given by name: values, fields of the rollout, and attributes of objects, which dotted names give."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kltest.errors import UsageError
from kltest.names import FIELDS, field_named
from kltest.rollout import Rollout, fields_behind


@dataclass(frozen=True)
class FieldOf:
    """A field of the rollout, as "@name" gives it."""

    name: str

    @property
    def words(self) -> str:
        """What it is in a report."""
        return self.name

    def at(self, view: Rollout) -> Any:
        """Return it for one batch."""
        return getattr(view, self.name)


@dataclass(frozen=True)
class PaddingOf(FieldOf):
    """The mask the other way round: 1 at padding."""

    name: str = "mask"

    @property
    def words(self) -> str:
        """What it is in a report."""
        return "mask, 1 at padding and 0 on live tokens"

    def at(self, view: Rollout) -> Any:
        """Return it for one batch."""
        return (view.mask == 0).to(view.mask.dtype)


@dataclass(frozen=True)
class SupportOf(FieldOf):
    """A field of the `k` likeliest tokens `of` the reference ("ref_") or the policy (""), or the mask for each of them.

    `asked`: k was given; `said`: a parameter or the name of the ids says whose they are.
    """

    k: int
    of: str
    asked: bool = False
    said: bool = False

    def at(self, view: Rollout) -> Any:
        """Return it for one batch."""
        if self.name == "mask":
            return view.mask[..., None].expand(view.support("topk_ids", self.k, self.of).shape).clone()
        view.accessed |= fields_behind(self.name)
        return view.support(self.name, self.k, self.of)


@dataclass(frozen=True)
class SizeOf:
    """The number of tokens that a support of `k` has in the vocabulary of a batch."""

    k: int

    def at(self, view: Rollout) -> int:
        """Return it for one batch."""
        return view.support_size(self.k)


class Attributes(dict[str, Any]):
    """Attributes of an object, by name: values, fields, and attributes of objects inside it."""

    def fields(self) -> set[str]:
        """Return the rollout fields among them, at any depth."""
        inner = [value.fields() for value in self.values() if isinstance(value, Attributes)]
        return {value.name for value in self.values() if isinstance(value, FieldOf)}.union(*inner)

    def with_value(self, path: str, value: object) -> "Attributes":
        """Return the same with a value for one of them, or by a dotted name for one of an object inside it."""
        name, dot, rest = path.partition(".")
        if not dot:
            return Attributes({**self, name: value})
        inner = self.get(name, Attributes())
        return Attributes({**self, name: inner.with_value(rest, value)})


def parsed(arguments: Mapping[str, object]) -> Attributes:
    """Return arguments as they fill parameters: "@name" is a field, dotted names are attributes of their first part.

    Raises:
        UsageError: There is no such field, a value was copied from a message as it stands, or an object and one of its
            attributes are both given.
    """
    found, dotted = Attributes(), dict[str, dict[str, object]]()
    for name, value in arguments.items():
        head, dot, rest = name.partition(".")
        if dot:
            dotted.setdefault(head, {})[rest] = value
        else:
            found[name] = _field_or_value(name, value)
    for name, attributes in dotted.items():
        if name in found:
            raise UsageError(f"--arg gives both {name} and {name}.{next(iter(attributes))}; give one of the two")
        found[name] = parsed(attributes)
    return found


def _field_or_value(name: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    if value in ("VALUE", "@FIELD"):
        raise UsageError(f"--arg {name}={value}: write what is meant in place of the capitals")
    if not value.startswith("@"):
        return value
    field = field_named(value[1:])
    if field is None:
        raise UsageError(f"{value!r} is no field of a rollout; the fields are {fields_listed()}")
    return FieldOf(field)


def fields_listed() -> str:
    """Return the fields as they are written in an argument, for messages."""
    return ", ".join(f"@{name}" for name in FIELDS)


def argument_for(name: str) -> str:
    """Return the option that fills the parameter or attribute `name`, with the field that its last part names."""
    field = field_named(name.rpartition(".")[2])
    return f"--arg {name}={f'@{field}' if field else 'VALUE'}"
