"""The result of a preflight as plain data: text, and JSON in the schema kltest.preflight/1."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kltest.errors import KltestError
from kltest.names import listed
from kltest.render.tables import PLAIN, Terminal, by_status, wrap
from kltest.render.words import visible
from kltest.report import Published

FAILED, WARNING, PASSED, NOT_LOOKED_AT = "failed", "warning", "passed", "not looked at"
STATUSES = (FAILED, WARNING, PASSED, NOT_LOOKED_AT)


class PreflightError(KltestError):
    """Raised by Preflight.raise_for_failure: a check failed."""

    exit_code = 1


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its name.
        status: One of STATUSES.
        message: What was found, with its numbers, and what to do.
        numbers: The same numbers by name.
        related: Code of the check of `kltest explain` that says more.
    """

    check: str
    status: str
    message: str
    numbers: dict[str, float] = field(default_factory=dict)
    related: str = ""


@dataclass(frozen=True)
class Preflight(Published):
    """The result of a preflight.

    Attributes:
        target: The name of the loss.
        verdict: "failed" if a check failed; "passed" if none did and the KL term was looked at (`equal weights` or
            `coefficient`), which says nothing of checks that were not looked at; else "not looked at".
        beta: The coefficient.
        rollouts, tokens: How many rows the batch has, and how many tokens that count.
        read: The name in the batch of each field.
        findings: A finding of each check.
        passes: How many passes were made, by `policy`, `reference` and `backward`.
        notes: Sentences.
    """

    SCHEMA = "kltest.preflight/1"
    CODES: ClassVar = {PASSED: 0, FAILED: 1, NOT_LOOKED_AT: 4}
    target: str
    verdict: str
    beta: float
    rollouts: int
    tokens: int
    read: dict[str, str]
    findings: list[Finding]
    passes: Mapping[str, int]
    notes: list[str]
    versions: dict[str, str]
    seconds: float

    def __getitem__(self, check: str) -> Finding:
        return next(one for one in self.findings if one.check == check)

    def having(self, status: str) -> list[str]:
        """Return the names of the checks with a status."""
        return [one.check for one in self.findings if one.status == status]

    def raise_for_failure(self) -> None:
        """Raise PreflightError with the report as its text if a check failed, or the KL term was not looked at."""
        if self.verdict != PASSED:
            raise PreflightError(self.to_text())

    def scalars(self) -> dict[str, float]:
        """Return numbers for a log: how many checks have each status, and what they found."""
        counts = {status.replace(" ", "_"): float(len(self.having(status))) for status in STATUSES}
        found = {f"{one.check.replace(' ', '_')}/{name}": n for one in self.findings for name, n in one.numbers.items()}
        return counts | found

    def first_line(self) -> str:
        """Return the verdict, the checks that failed or warn, and how many were not looked at."""
        words = [self.verdict.upper() + (f": {listed(failed)}" if (failed := self.having(FAILED)) else "")]
        if warned := self.having(WARNING):
            words.append(f"warning: {listed(warned)}")
        words.append(f"{len(self.having(NOT_LOOKED_AT))} of {len(self.findings)} checks not looked at")
        return "; ".join(words)

    def to_text(self, terminal: Terminal = PLAIN) -> str:
        """Return the report for people."""
        return "\n".join(self._lines(terminal)) + "\n"

    def _lines(self, terminal: Terminal) -> Iterator[str]:
        yield visible(f"{self.target}: {self.first_line()}", keep="")
        found = [(one.status, one.check, visible(one.message), one.related) for one in self.findings]
        yield from by_status(STATUSES, found, terminal)
        read = ", ".join(name if name == key else f"{name} ({key})" for name, key in self.read.items())
        passes = listed([f"{count} {name}" for name, count in self.passes.items()])
        facts = f"{self.rollouts:,} rollouts, {self.tokens:,} tokens, β {self.beta:g}. Read: {read or 'ids and masks'}."
        yield from wrap(visible(" ".join((facts, f"Passes: {passes}; {self.seconds:.1f} s.", *self.notes))), terminal)
