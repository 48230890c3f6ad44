"""Supports: how many tokens the fields of a support have, and whose likeliest tokens they are."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from kltest.errors import UsageError
from kltest.loss.arguments import FieldOf, SizeOf, SupportOf
from kltest.names import SUPPORT_FIELDS, SUPPORT_SIDE, SUPPORT_SIZE, SUPPORT_SIZES, field_named, whose

Parameters = Mapping[str, inspect.Parameter]


class Stated(NamedTuple):
    """A support as arguments and defaults state it: its size, and the prefix of the side that decides, if any.

    `asked`: the size is no default.
    """

    size: int
    of: str | None
    asked: bool = False


def stated(parameters: Parameters, given: dict[str, Any]) -> Stated:
    """Return the size and side of a support: what is given for it, or the default of a parameter that says so.

    What is given for the fields of a support under a name that no parameter has is theirs alone: it is taken out of
    `given`.

    Raises:
        UsageError: The size is no number of tokens, or the side is none.
    """
    reads = any(field_named(key) in SUPPORT_FIELDS for key in parameters)
    sizes = {key: given[key] for key in SUPPORT_SIZES if key in given and reads}
    if wrong := next((key for key, size in sizes.items() if type(size) is not int), None):
        raise UsageError(f"{wrong}={sizes[wrong]!r}: a support has a whole number of tokens")

    def value(key: str) -> Any:
        if key in given:
            return given[key] if key in parameters or not reads else given.pop(key)
        return parameters[key].default if key in parameters else None

    size = next((found for key in SUPPORT_SIZES if type(found := value(key)) is int), SUPPORT_SIZE)
    side = value(SUPPORT_SIDE)
    of = whose(side) if isinstance(side, str) else None
    if reads and size < 1:
        raise UsageError(f"a support has at least one token, not {size}")
    if reads and isinstance(side, str) and of not in ("", "ref_"):
        raise UsageError(f"{SUPPORT_SIDE}={side!r}: say whose likeliest tokens they are, teacher or student")
    return Stated(size, of, bool(sizes))


def filled(fillings: Mapping[str, Any], parameters: Parameters, support: Stated) -> dict[str, Any]:
    """Return fillings whose fields of a support have its size and side: as stated, or as the name of the ids says.

    A number of tokens that no small environment has, as 64, becomes what its vocabulary allows.
    """
    fields = {key: one.name for key, one in fillings.items() if isinstance(one, FieldOf)}
    supports = {key: fields[key] for key, one in fillings.items() if isinstance(one, SupportOf)}
    supports |= {key: name for key, name in fields.items() if name in SUPPORT_FIELDS}
    sides = [support.of, *(whose(key) for key, name in supports.items() if name == "topk_ids")]
    said = [side for side in sides if side is not None]
    made = {
        key: SupportOf(name, support.size, [*said, "ref_"][0], support.asked, bool(said))
        for key, name in supports.items()
    }
    found = {**fillings, **made}
    sees_all = "ref_logits" in fields.values()
    for key in SUPPORT_SIZES:
        whole = key in parameters and type(fillings.get(key, parameters[key].default)) is int
        large = sees_all and support.size >= SUPPORT_SIZE and key not in fillings  # what is given is given as it is
        if whole and (supports or large):
            found[key] = SizeOf(support.size)
    return found


def distinguished(fillings: Mapping[str, Any], parameters: Parameters) -> SupportOf | None:
    """Return the tokens that a loss distinguishes: those of its fields, or as many as it states if it sees all."""
    if found := next((one for one in fillings.values() if isinstance(one, SupportOf)), None):
        return found
    given = {key: one.k if isinstance(one, SizeOf) else one for key, one in fillings.items()}
    says = any(type(given.get(key, parameters[key].default)) is int for key in SUPPORT_SIZES if key in parameters)
    if not says or not any(isinstance(one, FieldOf) and one.name == "ref_logits" for one in fillings.values()):
        return None
    support = stated(parameters, given)
    if support.size < 1:
        return None
    return SupportOf("topk_ids", support.size, support.of or "", said=support.of is not None)
