"""A check: a known pitfall under a stable code, its words, and the module that finds and demonstrates it."""

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kltest.report import Level, Status

if TYPE_CHECKING:
    from kltest.checks.demonstrations import Demonstration
    from kltest.identify.findings import Findings, Row

LOSSES = "kltest.checks.losses"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Found:
    """Result of an experiment in whole sentences: the defect, a measurement, or why it could not be made.

    `level` is given if it depends on what was found; else it is the check's own.
    """

    message: str
    status: Status = "fail"
    level: Level | None = None


def signed(number: float, digits: int = 6) -> str:
    """A number in words: with a true minus sign."""
    return f"{number:.{digits}g}".replace("-", "−")


@dataclass(frozen=True)
class Check:
    """One pitfall.

    `code` and `name` are stable; `level` is that of a failure unless what was found decides. The texts are whole
    sentences, `example` has exact numbers; `full_fix` is the fix of a loss that takes whole next-token distributions,
    if it differs; `declare` is what the wrong loss follows, if declaring that makes it right, and `otherwise` says when
    a failure has the other level. They come from the family's words.toml and are read without torch; `module`, the
    dotted name of the check's module, is imported when one of its functions is first needed. That module defines

    - the loss that falls into the pitfall (`wrong`) and the same loss put right (`fixed`), if they are not shared in
      kltest.checks.losses, graded with `options`. Their source is shown to people, so it is written as a library would
      write it;
    - optionally `demonstrate(losses)`: exact numbers of the pitfall, the numbers of `example` among them. Without it
      they are made from `demonstration` (see kltest.checks.demonstrations);
    - `explains(row, findings)`: True, or a few words on how, if this pitfall accounts for the disagreement of that row;
    - optionally `summary(rows, findings)`: the first sentence on those rows, in place of the title;
    - optionally `remark(findings)`: a sentence that follows the rows, or "";
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
    sources: Sequence[str]
    module: str = field(repr=False)
    wrong_name: str = field(repr=False)
    fixed_name: str = field(repr=False)
    declare: str = ""
    otherwise: str = ""
    full_fix: str = ""
    full_name: str = field(default="", repr=False)
    level: Level = "error"
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
        return self._source(self.wrong_name)

    @property
    def fixed_code(self) -> str:
        """Source of the corrected loss."""
        return self._source(self.fixed_name)

    def remedy(self, uses: Collection[str] = ()) -> str:
        """Return what to change, in words and then, after an empty line, in code.

        Args:
            uses: fields of the rollout that the loss takes; one that takes whole distributions may be mended otherwise.
        """
        if self.full_fix and "ref_logits" in uses:
            return f"{self.full_fix}\n\n{self._source(self.full_name)}"
        return f"{self.fix}\n\n{self.fixed_code}"

    @property
    def experiments(self) -> bool:
        """True if the check makes an experiment of its own."""
        return self._defined("examine") is not None

    def demonstrate(self) -> "Demonstration":
        """Run the pitfall in the smallest environment that shows it."""
        from kltest.checks.demonstrations import demonstrate  # imports torch

        losses = {"as written": self.wrong, "fixed": self.fixed}
        own = self._defined("demonstrate")
        return own(losses) if own else demonstrate(losses, self.demonstration, self.options)

    def explains(self, row: "Row", findings: "Findings") -> bool:
        """Return True if the pitfall accounts for the disagreement of a row."""
        return bool(self._call("explains", row, findings))

    def tells(self, row: "Row", findings: "Findings") -> str:
        """Return how the pitfall shows in a row that it explains, empty if the identified gradient says it all."""
        words = self._call("explains", row, findings)
        return words if isinstance(words, str) else ""

    def summary(self, rows: Sequence["Row"], findings: "Findings") -> str:
        """Return the first sentence on the rows that it explains, without its full stop."""
        return self._call("summary", rows, findings) or self.title

    def remark(self, findings: "Findings") -> str:
        """Return a sentence on all the rows that it explains, or ""."""
        return self._call("remark", findings) or ""

    def examine(self, findings: "Findings") -> Found | None:
        """Make the check's experiment; None if it has none or found nothing wrong."""
        return self._call("examine", findings)

    def moot(self, findings: "Findings") -> str | None:
        """Return the reason to skip the check, or None."""
        return self._call("moot", findings)

    def _call(self, name: str, *arguments: Any) -> Any:
        function = self._defined(name)
        return function(*arguments) if function else None

    def _loss(self, name: str) -> Callable[..., Any]:
        return self._defined(name) or getattr(import_module(LOSSES), name)

    def _defined(self, name: str) -> Any:
        return getattr(import_module(self.module), name, None)

    def _source(self, name: str) -> str:
        """Source of a loss, read without importing its module."""
        for module in (self.module, LOSSES):
            text = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return ast.get_source_segment(text, node) or ""
        raise LookupError(f"no function is called {name!r}")
