"""The options of `kltest grade`, wherever they stand: each one's form, checked before anything is run.

A value comes from the command line (text) or from `[tool.kltest]` (TOML); `where` names the place in messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from kltest.errors import UsageError, did_you_mean
from kltest.estimators.spec import Credit, Placement

DEFAULT_TIMEOUT = 60.0
SAMPLERS = ("current", "stale", "both")


def expectation(value: object, where: str) -> str:
    from kltest.truth import parse

    text = _text(value, where)
    try:
        parse(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return text


def choice(*known: str) -> Callable[[object, str], str]:
    def check(value: object, where: str) -> str:
        return _known(_text(value, where), known, where)

    return check


def environments(value: object, where: str) -> tuple[str, ...]:
    from kltest.identify.instances import ENVIRONMENTS, NETWORKS

    names = tuple(dict.fromkeys(_known(name, tuple(ENVIRONMENTS), where) for name in _names(value, where)))
    if NETWORKS.intersection(names):
        from kltest.language_models.models import needs_transformers

        needs_transformers()
    return names


def codes(value: object, where: str) -> tuple[str, ...]:
    from kltest.checks import CHECKS

    prefixes = tuple(name.upper() for name in _names(value, where))
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in CHECKS):
            hint = did_you_mean(prefix, CHECKS)
            raise UsageError(
                f"{where}: no check's code begins with {prefix!r}; {hint}the codes are {', '.join(CHECKS)}"
            )
    return prefixes


def arguments(value: object, where: str) -> dict[str, object]:
    from kltest.loss.arguments import parse_arguments

    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple | Mapping) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where}: give a table of arguments, or texts of the form NAME=VALUE; it is {value!r}")
    try:
        if isinstance(texts, Mapping):
            parse_arguments(f"{name}=" for name in texts)
            return dict(texts)
        return parse_arguments(texts)
    except UsageError as error:
        # The message names the option already, but not the file that it may stand in.
        raise UsageError(str(error) if where == "--arg" else f"{where}: {error}") from None


def whole(least: int) -> Callable[[object, str], int]:
    def check(value: object, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise UsageError(f"{where}: give a whole number of at least {least}; it is {value!r}")
        return value

    return check


def seconds(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:
        raise UsageError(f"{where}: give a positive number of seconds; it is {value!r}")
    return float(value)


def expected_failures(value: object, where: str) -> dict[str, str]:
    """A table of reasons by code, or texts CODE=REASON."""
    from kltest.grading.expected_failures import checked as reasons

    if isinstance(value, Mapping):
        return reasons(value, where)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and "=" in text for text in texts):
        raise UsageError(f"{where}: give CODE=REASON, as KL201='token-level on purpose'; it is {value!r}")
    found: dict[str, str] = {}
    for text in texts:
        code, _, reason = text.partition("=")
        excused = reasons({code.strip(): reason}, where)
        if found.keys() & excused:
            raise UsageError(f"{where}: {code.strip()} is excused twice")
        found |= excused
    return found


def switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{where}: give true or false; it is {value!r}")
    return value


def positive(below: float = math.inf) -> Callable[[object, str], float]:
    def check(value: object, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
            limit = f" below {below:g}" if below < math.inf else ""
            raise UsageError(f"{where}: give a positive number{limit}; it is {value!r}")
        return float(value)

    return check


def outputs(value: object, where: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where}: give FORMAT or FORMAT:PATH, or a list of these; it is {value!r}")
    return tuple(texts)


GRADE: dict[str, Callable[[object, str], Any]] = {
    "expect": expectation,
    "placement": choice(*get_args(Placement)),
    "credit": choice(*get_args(Credit)),
    "environment": environments,
    "sampler": choice(*SAMPLERS),
    "arg": arguments,
    "select": codes,
    "ignore": codes,
    "seed": whole(0),
    "timeout": seconds,
    "group-size": whole(2),
    "batch-size": whole(2),
    "method": choice("exact", "sampled"),
    "error-rate": positive(below=1.0),
    "margin": positive(),
    "samples": whole(1),
    "bound": positive(),
    "expected-failures": expected_failures,
    "allow-stale-excuses": switch,
}
"""The options that may differ from target to target."""


def flag(name: str) -> str:
    """How an option is written on the command line, where one excuse is given at a time."""
    return "--expect-failure" if name == "expected-failures" else f"--{name}"


def checked(options: Mapping[str, object], place: Callable[[str], str] = flag) -> dict[str, Any]:
    """The options that were given (not None), in their checked form; UsageError for the first that is wrong."""
    return {name: GRADE[name](value, place(name)) for name, value in options.items() if value is not None}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Checked options, a later layer winning; excuses add up."""
    found: dict[str, Any] = {}
    for layer in layers:
        excuses = {**found.get("expected-failures", {}), **layer.get("expected-failures", {})}
        found |= layer
        if excuses:
            found["expected-failures"] = excuses
    return found


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: give a text; it is {value!r}")
    return value


def _names(value: object, where: str) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{where}: give names separated by commas, or a list of names; it is {value!r}")
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        raise UsageError(f"{where}: give at least one name; it is {value!r}")
    return names


def _known(name: str, known: Iterable[str], where: str) -> str:
    names = list(known)
    if name not in names:
        hint = did_you_mean(name, names)
        raise UsageError(f"{where}: there is no {name!r}; {hint}choose from {', '.join(names)}")
    return name
