"""Choices of a configuration: values of expressions by their texts."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any


class Asked(dict[str, Any]):
    """Choices that remember which of them were asked for."""

    def __init__(self, choices: Mapping[str, Any]) -> None:
        super().__init__(choices)
        self.asked: dict[str, Any] = {}

    def __contains__(self, text: object) -> bool:
        return self.get(str(text), self) is not self

    def __getitem__(self, text: str) -> Any:
        self.asked[text] = super().__getitem__(text)
        return self.asked[text]

    def get(self, text: str, default: Any = None) -> Any:
        return self[text] if super().__contains__(text) else default


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
