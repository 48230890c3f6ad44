"""Settings of an experiment: named values, the grid that they span, and the values that a person may set instead.

`experiments/NAME/experiment.py` holds one `SETTINGS`. Every combination of its values is a configuration;
`--scale full`, `--seeds` and `--set` change the values, never the code.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kltest.errors import UsageError, did_you_mean
from kltest.files import literal

Value = bool | int | float | str | None
Configuration = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One setting: its value or values at quick scale, those at full scale, and the values that may be set.

    Without values for full scale it has the same at both; `allowed` is that of `Settings`.
    """

    quick: Value | tuple[Value, ...]
    full: Value | tuple[Value, ...] = None
    allowed: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Settings:
    """Settings of an experiment, as plain data.

    Attributes:
        title: Title of the experiment.
        tags: Words for its topics.
        values: Value of each name, or a tuple of values that are all run; a `Setting` is divided among `values`, `full`
            and `allowed`.
        full: Values that `--scale full` changes.
        seeds: Number of random repetitions by scale (`{"quick": 1, "full": 5}`); configurations then have a `seed`.
        allowed: Values that may be set: (smallest, largest) for numbers, the choices for words. A word without choices
            must be one of the grid's.
        applies: True for combinations that make sense.
        parts: For an experiment whose setting `part` names several, the settings that concern each part, `seed` among
            them if it is random; or a mapping from the part's names for them. Other settings do not change a part.
        recorded: True if its full scale takes hours, so that results of it are kept in the repository: then the main
            job runs its quick scale at every scale.
    """

    title: str
    tags: tuple[str, ...]
    values: Mapping[str, Any]
    full: Mapping[str, Value | tuple[Value, ...]] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    applies: Callable[[Mapping[str, Any]], bool] = lambda configuration: True
    parts: Mapping[str, Sequence[str] | Mapping[str, str]] = field(default_factory=dict)
    recorded: bool = False

    def __post_init__(self) -> None:
        whole = {name: one for name, one in self.values.items() if isinstance(one, Setting)}
        parts: dict[str, dict[str, Any]] = {
            "values": {name: one.quick for name, one in whole.items()},
            "full": {name: one.full for name, one in whole.items() if one.full is not None},
            "allowed": {name: one.allowed for name, one in whole.items() if one.allowed},
        }
        for attribute, own in parts.items():
            object.__setattr__(self, attribute, {**getattr(self, attribute), **own})

    def grid(self, scale: str, changes: Sequence[str] = (), seeds: int | None = None) -> dict[str, tuple[Value, ...]]:
        """Return each name's values at a scale, after changes such as "beta=0.1,1"; UsageError for impossible ones."""
        values = {**self.values, **self.full} if scale == "full" else self.values
        grid = {name: _several(value) for name, value in values.items()}
        grid |= map(self._change, changes)
        if seeds is not None and not self.seeds:
            raise UsageError("--seeds: nothing is random in this experiment; there is nothing to repeat")
        if seeds is not None and seeds < 1:
            raise UsageError(f"--seeds must be at least 1, not {seeds}")
        if self.seeds:
            grid["seed"] = tuple(range(self.seeds[scale] if seeds is None else seeds))
        return grid

    def configurations(self, grid: Mapping[str, Sequence[Value]]) -> list[Configuration]:
        """Return every combination of a grid's values that makes sense, in order, part after part."""
        grids = [self._of_part(str(part), grid) for part in grid["part"]] if self.parts else [grid]
        combinations = (
            dict(zip(one, chosen, strict=True)) for one in grids for chosen in itertools.product(*one.values())
        )
        return [configuration for configuration in combinations if self.applies(configuration)]

    def _of_part(self, part: str, grid: Mapping[str, Sequence[Value]]) -> Mapping[str, Sequence[Value]]:
        names = self.parts[part]
        names = names if isinstance(names, Mapping) else {name: name for name in names}
        return {"part": [part]} | {name: grid[setting] for name, setting in names.items()}

    def _change(self, text: str) -> tuple[str, tuple[Value, ...]]:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not equals or not values.strip():
            raise UsageError(f"--set {text}: write it as name=value, or name=value,value for several")
        if name not in self.values:
            hint = "; --seeds N says how many" if name == "seed" else _meant(name, self.values)
            there = f"there are: {', '.join(self.values)}" if self.values else "the experiment has no settings"
            raise UsageError(f"--set {text}: there is no setting {name!r}{hint}; {there}")
        known = [*_several(self.values[name]), *_several(self.full.get(name, ()))]
        return name, tuple(dict.fromkeys(self._value(text, name, part.strip(), known) for part in values.split(",")))

    def _value(self, text: str, name: str, part: str, known: Sequence[Value]) -> Value:
        kinds = {type(value) for value in known if value is not None}
        value = part if kinds == {str} else literal(part, bool | int | float | None)
        if part == "None" and None in known:
            value = None
        if kinds == {float} and type(value) is int:
            value = float(value)
        if not (type(value) in kinds or (value is None and None in known)):
            wanted = " or ".join(sorted(_KINDS[kind] for kind in kinds)) + (" or None" if None in known else "")
            example = next(value for value in known if value is not None)
            raise UsageError(f"--set {text}: {name} is {wanted}, as {example!r}, not {part!r}")
        allowed = self.allowed.get(name, ())
        if isinstance(value, str):
            choices = [str(choice) for choice in allowed or known]
            if value not in choices:
                meant = _meant(value, choices)
                raise UsageError(f"--set {text}: {name} cannot be {value!r}{meant}; it is one of: {', '.join(choices)}")
        elif allowed and isinstance(value, int | float) and not isinstance(value, bool):
            low, high = allowed
            if not low <= value <= high:
                between = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                between = between if low > -math.inf else f"at most {high:g}"
                raise UsageError(f"--set {text}: {name} must be {between}, not {part}")
        return value


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a word"}


def _several(value: Any) -> tuple[Value, ...]:
    return value if isinstance(value, tuple) else (value,)


def _meant(word: str, known: Iterable[str]) -> str:
    hint = did_you_mean(word, known).strip()
    return f" ({hint})" if hint else ""
