"""The zoo: losses that must fail a check and losses that must fail none. Adding one is adding a row to a file here.

Every file `mutants_*.py` has a list MUTANTS, every file `clean_*.py` a list CLEAN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A loss that must fail `code`; `also` are the other codes that rightly fail (KL8xx need no mention).

    `warns`: its defects are warnings, so that it is confirmed all the same.
    """

    code: str
    loss: Callable[..., Any] | str
    also: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    warns: bool = False

    @property
    def name(self) -> str:
        return f"{self.code}-{_name(self.loss)}"


@dataclass(frozen=True)
class Clean:
    """A correct loss, graded with `options`: it must be confirmed, and no check may fail, warnings aside."""

    loss: Callable[..., Any] | str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return _name(self.loss)


def _name(loss: Callable[..., Any] | str) -> str:
    return loss if isinstance(loss, str) else getattr(loss, "__qualname__", type(loss).__name__).replace("<lambda>", "")


def _collect(kind: str, table: str) -> list[Any]:
    files = sorted(Path(__file__).parent.glob(f"{kind}_*.py"))
    return [row for file in files for row in getattr(import_module(f"zoo.{file.stem}"), table)]


def mutants() -> list[Mutant]:
    return _collect("mutants", "MUTANTS")


def clean() -> list[Clean]:
    return _collect("clean", "CLEAN")
