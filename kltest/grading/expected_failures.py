"""Expected failures: checks that are known to fail, each with its reason.

A maintainer who follows a token-level gradient on purpose says so once, and continuous integration still sees every
other change. What an expected failure accounts for does not refute. If its check passes, the pass refutes unless that
is allowed: the entry would hide the next failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kltest.report import CheckResult

if TYPE_CHECKING:
    from kltest.identify.findings import Row


@dataclass(frozen=True)
class ExpectedFailures:
    """Reasons by code, in their checked form."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    allow_passes: bool = False

    def result(self, result: CheckResult) -> CheckResult:
        """Return a check's result with the reason of an expected failure, or of a pass that was not expected."""
        reason = self.reasons.get(result.code, "")
        if not reason or result.status not in ("fail", "pass"):
            return result
        if result.status == "fail":
            return replace(result, excused=reason)
        return result if self.allow_passes else replace(result, excused=reason, message=self._passes(result.code))

    def row(self, row: Row, explained: Mapping[str, Sequence[Row]]) -> Row:
        """Return a disagreeing row with the codes that account for it, if all of these are expected to fail."""
        codes = [code for code, rows in explained.items() if row in rows]
        if not (row.wrong and codes and all(code in self.reasons for code in codes)):
            return row
        return replace(row, excused=tuple(codes))

    def notes(self, results: Iterable[CheckResult], explained: Mapping[str, Sequence[Row]]) -> list[str]:
        """Return a note for each expected failure that changes nothing."""
        status = {result.code: result.status for result in results}
        found = []
        for code in self.reasons:
            if status.get(code) == "pass" and self.allow_passes:
                found.append(self._passes(code))
            elif code not in status and not explained.get(code):
                found.append(f"{code} is expected to fail, but was not selected.")
            elif status.get(code) in ("skip", "inconclusive"):
                found.append(f"{code} is expected to fail, but the check could not be made here.")
        return found

    def _passes(self, code: str) -> str:
        return (
            f"{code} is expected to fail ({self.reasons[code]}), but it passes: remove it from the expected failures, "
            "so that it does not hide the next failure."
        )
