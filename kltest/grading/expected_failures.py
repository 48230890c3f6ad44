"""Checks that are expected to fail, each with its reason: what they account for does not refute, and a stale one does.

A maintainer who follows a token-level gradient on purpose says so once, and continuous integration still sees every
other change. An excuse whose check passes is stale: it would hide the next failure, so it refutes unless allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kltest.checks import CHECKS
from kltest.errors import UsageError, did_you_mean
from kltest.report import CheckResult

if TYPE_CHECKING:
    from kltest.identify.findings import Row


def checked(given: object, where: str = "expected_failures") -> dict[str, str]:
    """Reasons by code, from a mapping; UsageError for an unknown code, and for an excuse that gives no reason."""
    if not isinstance(given, Mapping):
        raise UsageError(f'{where}: give a reason for each code, as {{"KL201": "why"}}; it is {given!r}')
    reasons: dict[str, str] = {}
    for code, reason in given.items():
        known = code.upper() if isinstance(code, str) else code
        if known not in CHECKS:
            hint = did_you_mean(known, CHECKS) if isinstance(known, str) else ""
            raise UsageError(f"{where}: there is no check {code!r}; {hint}the codes are {', '.join(CHECKS)}")
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"{where}: say why {known} is expected to fail; its reason is {reason!r}")
        if known in reasons:
            raise UsageError(f"{where}: {known} is excused twice")
        reasons[known] = reason.strip()
    return reasons


@dataclass(frozen=True)
class Excuses:
    """Reasons by code, as `checked` leaves them."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    allow_stale: bool = False

    def result(self, result: CheckResult) -> CheckResult:
        """A check's result with its reason: of a failure that is expected, or of a pass that is not."""
        reason = self.reasons.get(result.code, "")
        if not reason or result.status not in ("fail", "pass"):
            return result
        if result.status == "fail":
            return replace(result, excused=reason)
        return result if self.allow_stale else replace(result, excused=reason, message=self._stale(result.code))

    def row(self, row: Row, explained: Mapping[str, Sequence[Row]]) -> Row:
        """A disagreeing row with the codes that excuse it, where every check that accounts for it is excused."""
        codes = [code for code, rows in explained.items() if row in rows]
        if not (row.wrong and codes and all(code in self.reasons for code in codes)):
            return row
        return replace(row, excused=tuple(codes))

    def notes(self, results: Iterable[CheckResult], explained: Mapping[str, Sequence[Row]]) -> list[str]:
        """What is to be said of excuses that change nothing."""
        status = {result.code: result.status for result in results}
        found = []
        for code in self.reasons:
            if status.get(code) == "pass" and self.allow_stale:
                found.append(self._stale(code))
            elif code not in status and not explained.get(code):
                found.append(f"{code} is excused, but was not selected.")
            elif status.get(code) in ("skip", "inconclusive"):
                found.append(f"{code} is excused, but there was nothing to excuse: the check could not be made here.")
        return found

    def _stale(self, code: str) -> str:
        return (
            f"{code} is expected to fail ({self.reasons[code]}), but it passes: take the excuse out, so that it "
            "does not hide the next failure."
        )
