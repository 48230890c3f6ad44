"""A check: a known pitfall under a stable code, its words, and the module that finds and demonstrates it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kltest.counterexample.demonstration import Demonstration, of_gradients
from kltest.counterexample.environment import SmallEnvironment

if TYPE_CHECKING:
    from kltest.identify.findings import Findings, Row

LOSSES = "kltest.checks.losses"
# Entries of a demonstration that are not the environment's.
BATCH = frozenset({"batch", "grouped"})


@dataclass(frozen=True)
class Found:
    """Result of an experiment in whole sentences: the defect, a measurement, or why it could not be made."""

    message: str
    status: Literal["pass", "fail", "skip", "inconclusive"] = "fail"


@dataclass(frozen=True)
class Check:
    """One pitfall.

    `code` and `name` are stable. The texts are whole sentences, `example` has exact numbers. They come from the
    family's words.toml and are read without torch; `module`, the dotted name of the check's module, is imported when
    one of its functions is first needed. That module defines

    - the loss that falls into the pitfall (`wrong`) and the same loss put right (`fixed`, or one of
      kltest.checks.losses), graded with `options`. Their source is shown to people, so it is written as a library would
      write it;
    - optionally `demonstrate()`: exact numbers of the pitfall, the numbers of `example` among them. Without it they are
      the gradients of the two losses in the environment `demonstration`, in batches of `batch` rollouts;
    - `explains(row, findings)`: True if this pitfall accounts for the disagreement of that row, and optionally
      `tells(row, findings)`: a few words on how, if the identified gradient does not say it;
    - or `examine(findings)`: an experiment of its own and its result, None if nothing is wrong. A KltestError makes
      the check inconclusive;
    - optionally `moot(findings)`: the reason to skip the check, or None.
    """

    code: str
    name: str
    title: str
    what: str
    why: str
    example: str
    fix: str
    sources: tuple[str, ...]
    module: str = field(repr=False)
    wrong_name: str = field(repr=False)
    fixed_name: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    demonstration: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def wrong(self) -> Callable[..., Any]:
        """The loss that falls into the pitfall."""
        return self._loss(self.wrong_name)

    @property
    def fixed(self) -> Callable[..., Any]:
        """The corrected loss."""
        return self._loss(self.fixed_name)

    @property
    def wrong_code(self) -> str:
        """Source of the loss that falls into the pitfall."""
        return source(self.module, self.wrong_name)

    @property
    def fixed_code(self) -> str:
        """Source of the corrected loss."""
        return source(self.module, self.fixed_name)

    @property
    def remedy(self) -> str:
        """What to change, in words and then, after an empty line, in code."""
        return f"{self.fix}\n\n{self.fixed_code}"

    @property
    def experiments(self) -> bool:
        """True if the check makes an experiment of its own."""
        return self._defined("examine") is not None

    def demonstrate(self) -> Demonstration:
        """Run the pitfall in the smallest environment that shows it."""
        if own := self._defined("demonstrate"):
            return own()
        return of_gradients(
            SmallEnvironment(**{key: part for key, part in self.demonstration.items() if key not in BATCH}),
            {"as written": self.wrong, "fixed": self.fixed},
            declared=self.options.get("expect", "reverse_kl"),
            sampler="stale" if "sampler" in self.demonstration else "current",
            call=lambda name: {key: part for key, part in self.options.items() if key == "placement"},
            **{key: part for key, part in self.demonstration.items() if key in BATCH},
        )

    def explains(self, row: Row, findings: Findings) -> bool:
        """Return True if the pitfall accounts for the disagreement of a row."""
        explains = self._defined("explains")
        return explains is not None and explains(row, findings)

    def tells(self, row: Row, findings: Findings) -> str:
        """Return how the pitfall shows in a row that it explains, empty if the identified gradient says it all."""
        tells = self._defined("tells")
        return tells(row, findings) if tells else ""

    def examine(self, findings: Findings) -> Found | None:
        """Make the check's experiment; None if it has none or found nothing wrong."""
        examine = self._defined("examine")
        return examine(findings) if examine else None

    def moot(self, findings: Findings) -> str | None:
        """Return the reason to skip the check, or None."""
        moot = self._defined("moot")
        return moot(findings) if moot else None

    def _loss(self, name: str) -> Callable[..., Any]:
        return self._defined(name) or getattr(import_module(LOSSES), name)

    def _defined(self, name: str) -> Any:
        return getattr(import_module(self.module), name, None)


def source(module: str, name: str) -> str:
    """Source of a function that a module defines, imports by name or shares (LOSSES), read without importing it."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return source(node.module, name)
    if module == LOSSES:
        raise LookupError(f"no function is called {name!r}")
    return source(LOSSES, name)
