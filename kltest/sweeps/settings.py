"""What an experiment may vary: named values, the grid that they span, and what a person may set instead.

`experiments/NAME/settings.py` holds one `SETTINGS`. Every combination of its values is a configuration; `--scale full`,
`--seeds` and `--set` change the values, never the code.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kltest.errors import UsageError, did_you_mean

Value = bool | int | float | str | None
Configuration = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The settings of an experiment, as plain data.

    `values`: each name's value, or a tuple of values that are all run. `full`: those that `--scale full` changes.
    `seeds`: how many random repetitions (`{"quick": 1, "full": 5}`); configurations have a `seed` from 0 up then.
    `allowed`: what may be set: (smallest, largest) for numbers, the choices for words; a word without choices may only
    be one that the grid has. `applies` says which combinations make sense. `tags` say what it is about.
    `parts`, of an experiment whose setting `part` names several: for each the settings that concern it, `seed` among
    them where it is random; or, as a mapping, what it calls them and what they are called here. Whatever else is set
    makes no difference to it.
    """

    title: str
    tags: tuple[str, ...]
    values: Mapping[str, Value | tuple[Value, ...]]
    full: Mapping[str, Value | tuple[Value, ...]] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    applies: Callable[[Mapping[str, Any]], bool] = lambda configuration: True
    parts: Mapping[str, Sequence[str] | Mapping[str, str]] = field(default_factory=dict)

    def grid(self, scale: str, changes: Sequence[str] = (), seeds: int | None = None) -> dict[str, tuple[Value, ...]]:
        """Each name's values at a scale, with changes such as "beta=0.1,1" made; UsageError for what cannot be."""
        grid = {
            name: _several(value) for name, value in {**self.values, **(self.full if scale == "full" else {})}.items()
        }
        for change in changes:
            name, value = self._change(change)
            grid[name] = value
        if seeds is not None and not self.seeds:
            raise UsageError("--seeds: nothing is random in this experiment; there is nothing to repeat")
        if seeds is not None and seeds < 1:
            raise UsageError(f"--seeds must be at least 1, not {seeds}")
        if self.seeds:
            grid["seed"] = tuple(range(self.seeds[scale] if seeds is None else seeds))
        return grid

    def configurations(self, grid: Mapping[str, Sequence[Value]]) -> list[Configuration]:
        """Every combination of a grid's values that makes sense, in order; of several parts, part after part."""
        if self.parts:
            own = [{"part": [part], **self._of_part(str(part), grid)} for part in grid["part"]]
        else:
            own = [dict(grid)]
        combinations = (
            dict(zip(one, chosen, strict=True)) for one in own for chosen in itertools.product(*one.values())
        )
        return [configuration for configuration in combinations if self.applies(configuration)]

    def _of_part(self, part: str, grid: Mapping[str, Sequence[Value]]) -> dict[str, Sequence[Value]]:
        names = self.parts[part]
        names = names if isinstance(names, Mapping) else {name: name for name in names}
        return {name: grid[setting] for name, setting in names.items()}

    def _change(self, text: str) -> tuple[str, tuple[Value, ...]]:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not equals or not values.strip():
            raise UsageError(f"--set {text}: write it as name=value, or name=value,value for several")
        if name not in self.values:
            hint = "; --seeds N says how many" if name == "seed" else _meant(name, self.values)
            raise UsageError(f"--set {text}: there is no setting {name!r}{hint}; there are: {', '.join(self.values)}")
        known = [*_several(self.values[name]), *_several(self.full.get(name, ()))]
        found = tuple(dict.fromkeys(self._value(text, name, part.strip(), known) for part in values.split(",")))
        return name, found

    def _value(self, text: str, name: str, part: str, known: Sequence[Value]) -> Value:
        kinds = {type(value) for value in known if value is not None}
        value = None if part == "None" and None in known else part if kinds == {str} else _literal(part)
        if kinds == {float} and type(value) is int:
            value = float(value)
        fits = type(value) in kinds or (value is None and None in known)
        if not fits:
            wanted = " or ".join(sorted(_KINDS[kind] for kind in kinds)) + (" or None" if None in known else "")
            raise UsageError(f"--set {text}: {name} is {wanted}, as {_example(known)}, not {part!r}")
        allowed = self.allowed.get(name, ())
        if isinstance(value, str):
            choices = allowed or tuple(known)
            if value not in choices:
                meant = _meant(value, map(str, choices))
                raise UsageError(
                    f"--set {text}: {name} cannot be {value!r}{meant}; it is one of: {', '.join(map(str, choices))}"
                )
        elif isinstance(value, int | float) and not isinstance(value, bool):
            low, high = allowed or (-math.inf, math.inf)
            if not low <= value <= high:
                raise UsageError(f"--set {text}: {name} must be {_between(low, high)}, not {part}")
        return value


def representative(configurations: Sequence[Configuration]) -> list[Configuration]:
    """A small subset in which every value of every setting occurs: enough to see that an experiment runs at all."""
    unseen = {(name, repr(value)) for configuration in configurations for name, value in configuration.items()}
    chosen: list[Configuration] = []
    while unseen:
        best = max(configurations, key=lambda one: len(unseen & {(name, repr(value)) for name, value in one.items()}))
        unseen -= {(name, repr(value)) for name, value in best.items()}
        chosen.append(best)
    return chosen


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a word"}


def _several(value: Any) -> tuple[Value, ...]:
    return value if isinstance(value, tuple) else (value,)


def _literal(text: str) -> Any:
    """A number, True, False or None; the text itself where it is none of them."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


def _example(known: Sequence[Value]) -> str:
    return repr(next(value for value in known if value is not None))


def _between(low: float, high: float) -> str:
    if low == -math.inf:
        return f"at most {high:g}"
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"


def _meant(word: str, known: Iterable[str]) -> str:
    hint = did_you_mean(word, known).strip()
    return f" ({hint})" if hint else ""
