"""Choices of a configuration: values of expressions by their texts."""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Asked(dict[str, Any]):
    """Choices that remember which of them were `asked` for, and which texts they have no choice for (`missed`)."""

    def __init__(self, choices: Mapping[str, Any]) -> None:
        super().__init__(choices)
        self.asked: dict[str, Any] = {}
        self.missed: set[str] = set()

    def __contains__(self, text: object) -> bool:
        return self.get(str(text), self) is not self

    def __getitem__(self, text: str) -> Any:
        self.asked[text] = super().__getitem__(text)
        return self.asked[text]

    def get(self, text: str, default: Any = None) -> Any:
        if super().__contains__(text):
            return self[text]
        self.missed.add(text)
        return default

    def agree(self, asked: Mapping[str, Any], missed: Set[str]) -> bool:
        """Return True for the same choices where others were asked, and none where they missed one."""
        return missed.isdisjoint(self) and all(
            dict.get(self, text, Asked) == value and type(dict.get(self, text)) is type(value)
            for text, value in asked.items()
        )


class Remembered(Generic[Result]):
    """Results by a key and by what was read of the choices to make them; an exception is a result, too."""

    def __init__(self) -> None:
        self._made: dict[Hashable, list[tuple[dict[str, Any], set[str], Result | Exception]]] = {}

    def get(self, key: Hashable, choices: Asked, make: Callable[[], Result]) -> Result:
        """Return what was made for the key and such choices, made now if it never was."""
        made = self._made.setdefault(key, [])
        known = next((each for each in made if choices.agree(*each[:2])), None)
        if known is None:
            before, choices.asked, choices.missed = choices.asked, {}, set()
            result: Result | Exception
            try:
                result = make()
            except Exception as error:
                result = error
            known = (choices.asked, choices.missed, result)
            made.append(known)
            choices.asked = before
        choices.asked |= known[0]
        if isinstance(known[2], Exception):
            raise known[2]
        return known[2]


def telling(choices: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return what distinguishes choices: what all of them have in common tells none of them."""
    return {text for choice in choices for text in choice if len({repr(each.get(text, "")) for each in choices}) > 1}


def agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two choices have the same value of all that both speak of."""
    return all(one[text] == other[text] for text in one.keys() & other.keys())


def named(choice: Mapping[str, Any], alike: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> str:
    """Return a choice in words, of which `alike` are other values that change nothing."""

    def one(text: str, value: Any) -> str:
        short = text.rsplit(".", 1)[-1] if text.replace(".", "").replace("_", "").isalnum() else text
        if text.endswith(" is not None"):
            return f"{'with' if value else 'without'} {text.removesuffix(' is not None')}"
        if value is True:
            return short
        if value is False:
            return f"not {short}"
        others = "".join(f" or {other!r}" for other in alike.get(text, ()))
        return f"{short}={value!r}{others}" if isinstance(value, str | int | float) else f"{short} otherwise"

    return ", ".join(one(text, value) for text, value in choice.items() if value is not None)
