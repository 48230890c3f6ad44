"""Forms that the value of an option may take: each is a function that checks a value and returns it as it is used.

A value comes from the command line (text), from `[tool.kltest]` (TOML) or from Python. `where` names its place in
messages. Every form raises UsageError for a value of another kind. Nothing here imports torch.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from kltest.errors import UsageError, did_you_mean
from kltest.files import literal
from kltest.samplers import check as sampler_named

Form = Callable[[object, str], Any]


def combination(value: object, where: str) -> dict[str, float]:
    """A combination of named gradients, as text or as coefficients by name."""
    from kltest.truth import parse
    from kltest.truth.atlas import canonical

    if not isinstance(value, Mapping):
        text(value, where)
    elif not all(isinstance(name, str) and is_number(number) for name, number in value.items()):
        raise UsageError(f'{where}: give numbers by the names of gradients, as {{"reverse_kl": 1.0}}; it is {value!r}')
    try:
        return canonical(value) if isinstance(value, Mapping) else parse(str(value))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def choice(*known: str) -> Form:
    """One of a few names."""
    return lambda value, where: _known(text(value, where), known, where)


def sampler(value: object, where: str) -> str:
    """A sampler, or "both" for current and stale."""
    name = text(value, where)
    try:
        return name if name == "both" else sampler_named(name)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def environments(value: object, where: str) -> tuple[str, ...]:
    """Names of environments, each once; UsageError if one of them needs a package that is not installed."""
    from kltest.identify.instances import ENVIRONMENTS, NETWORKS

    names = tuple(dict.fromkeys(_known(name, tuple(ENVIRONMENTS), where) for name in _names(value, where)))
    if NETWORKS.intersection(names):
        from kltest.language_models.models import needs_transformers

        needs_transformers()
    return names


def codes(value: object, where: str) -> tuple[str, ...]:
    """Codes of checks or their first letters, in capitals."""
    from kltest.checks import CHECKS

    prefixes = tuple(name.upper() for name in _names(value, where))
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in CHECKS):
            raise UsageError(f"{where}: there is no check whose code begins with {prefix!r}; {_near_codes(prefix)}")
    return prefixes


def arguments(value: object, where: str) -> dict[str, object]:
    """Arguments of the loss, by name; of a text NAME=VALUE the value is read as a Python literal if it is one."""
    pairs = _pairs(value, where, "a table of arguments, or texts of the form NAME=VALUE or NAME=@FIELD")
    found: dict[str, object] = {}
    for name, given in pairs:
        if not (isinstance(name, str) and all(part.isidentifier() for part in name.split("."))):
            raise UsageError(f"{where}: give NAME=VALUE or NAME=@FIELD, with an argument's name; the name is {name!r}")
        if name in found:
            raise UsageError(f"{where}: {name!r} is given twice; give it once")
        found[name] = given if isinstance(value, Mapping) else literal(given)
    return found


def expected_failures(value: object, where: str) -> dict[str, str]:
    """Reasons by code, as a table or as texts CODE=REASON; every code exists and every reason says something."""
    ask = 'a reason for each code, as CODE=REASON on the command line or as {"KL201": "token-level on purpose"}'
    reasons: dict[str, str] = {}
    for code, reason in _pairs(value, where, ask):
        known = _code(code.upper() if isinstance(code, str) else code, where)
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"{where}: say why {known} is expected to fail; its reason is {reason!r}")
        if known in reasons:
            raise UsageError(f"{where}: {known} is given two reasons; give one")
        reasons[known] = reason.strip()
    return reasons


def levels(value: object, where: str) -> dict[str, str]:
    """Levels by code."""
    if not isinstance(value, Mapping):
        raise UsageError(f'{where}: give levels by code, as {{ KL502 = "error" }}; it is {value!r}')
    for code, level in value.items():
        _code(code, where)
        if level not in ("error", "warning"):
            raise UsageError(f'{where}: the level of {code} is "error" or "warning"; it is {level!r}')
    return dict(value)


def _code(code: Any, where: str) -> str:
    """The code of a check."""
    from kltest.checks import CHECKS

    if code not in CHECKS:
        raise UsageError(f"{where}: there is no check {code!r}; {_near_codes(code)}")
    return str(code)


def _near_codes(code: object) -> str:
    """Return the codes of the same length that differ in one character, at most three, else what lists them."""
    from kltest.checks import CHECKS

    text = str(code).upper()
    near = [one for one in CHECKS if len(one) == len(text) and sum(map(str.__ne__, one, text)) == 1][:3]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"they go from {min(CHECKS)} to {max(CHECKS)}, and `kltest list` has them"


def _pairs(value: object, where: str, ask: str) -> list[tuple[Any, Any]]:
    """The entries of a table, or of a text KEY=VALUE or several; `ask` says what to give."""
    if isinstance(value, Mapping):
        return list(value.items())
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise UsageError(f"{where}: give {ask}; it is {value!r}")
    if not all(isinstance(each, str) and "=" in each for each in texts):
        wrong = next((one for one in texts if isinstance(one, str) and "=" not in one), value)
        raise UsageError(f"{where}: give {ask}; it is {wrong!r}")
    return [(key.strip(), given) for key, _, given in (each.partition("=") for each in texts)]


def _form(expected: str, accepts: Callable[[Any], bool], kind: Callable[[Any], Any] = lambda value: value) -> Form:
    """The form of values that `accepts` takes, each returned as its `kind`; `expected` says what to give."""

    def form(value: object, where: str) -> Any:
        if not accepts(value):
            raise UsageError(f"{where}: give {expected}; it is {value!r}")
        return kind(value)

    return form


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a Python number that is neither a truth value nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def whole(least: int) -> Form:
    """A whole number of at least `least`."""
    return _form(
        f"a whole number of at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63,
    )


def positive(below: float = math.inf) -> Form:
    """A finite positive number below `below`."""
    limit = f" below {below:g}" if below < math.inf else ""
    return _form(f"a positive number{limit}", lambda value: is_number(value) and 0 < value < below, float)


seconds = _form("a positive number of seconds", lambda value: is_number(value) and value > 0, float)
switch = _form("true or false", lambda value: isinstance(value, bool))
text = _form("a text", lambda value: isinstance(value, str))
title = _form("a text to call the loss by", lambda value: isinstance(value, str) and bool(value.strip()))
coefficient = _form(
    "a finite number other than 0, since the KL part is what changes with it",
    lambda value: is_number(value) and 0 < abs(value) < math.inf,
)


def outputs(value: object, where: str) -> tuple[str, ...]:
    """Places of reports: FORMAT or FORMAT:PATH, one or several."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(each, str) for each in texts):
        raise UsageError(f"{where}: give FORMAT or FORMAT:PATH, or a list of these; it is {value!r}")
    return tuple(texts)


def _names(value: object, where: str) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    listed = list(parts) if isinstance(parts, Iterable) and not isinstance(parts, Mapping) else [None]
    names = [part.strip() for part in listed if isinstance(part, str)]
    if len(names) < len(listed):
        raise UsageError(f"{where}: give names separated by commas, or a list of names; it is {value!r}")
    if not any(names):
        raise UsageError(f"{where}: give at least one name; it is {value!r}")
    return [name for name in names if name]


def _known(name: Any, known: Iterable[str], where: str) -> str:
    names = list(known)
    if name not in names:
        hint = did_you_mean(name, names) if isinstance(name, str) else ""
        raise UsageError(f"{where}: there is no {name!r}; {hint}choose from {', '.join(names)}")
    return name
