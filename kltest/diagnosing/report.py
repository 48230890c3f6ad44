"""The result of a diagnosis as plain data: text, and JSON in the schema kltest.diagnose/1."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kltest.diagnosing.answers import FINDING, INCONCLUSIVE, NOT_LOOKED_AT, NOTHING, STATUSES, Answer
from kltest.names import listed
from kltest.render.tables import PLAIN, Terminal, by_status, wrap
from kltest.render.words import visible
from kltest.report import Published


@dataclass(frozen=True)
class Diagnosis(Published):
    """The result of a diagnosis.

    Attributes:
        source: Where the logs come from.
        verdict: "finding"; "inconclusive" if a question could not be decided, or with `strict` was not looked at; else
            "nothing found", which says nothing of questions that were not looked at.
        error_rate: Highest probability that any interval misses.
        unit: What is independent of each other: "prompt" or "rollout".
        units, rollouts, tokens: How many there are.
        columns: The name in the file of each column that was read.
        unread: Names that were not read.
        answers: An answer to each question.
        notes: Sentences.
    """

    SCHEMA = "kltest.diagnose/1"
    CODES: ClassVar = {NOTHING: 0, FINDING: 1, INCONCLUSIVE: 4}
    source: str
    verdict: str
    error_rate: float
    unit: str
    units: int
    rollouts: int
    tokens: int
    columns: dict[str, str]
    unread: list[str]
    answers: list[Answer]
    notes: list[str]
    versions: dict[str, str]
    seconds: float

    def __getitem__(self, question: str) -> Answer:
        return next(one for one in self.answers if one.question == question)

    def first_line(self) -> str:
        """Return the verdict, the questions that it comes from, and how many were not looked at."""
        which = [one.question for one in self.answers if one.status == self.verdict != NOTHING]
        unseen = sum(one.status == NOT_LOOKED_AT for one in self.answers)
        verdict = ": ".join(filter(None, (self.verdict.upper(), listed(which))))
        return f"{verdict}; {unseen} of {len(self.answers)} questions not looked at"

    def facts(self) -> str:
        """Return in a few sentences what was read, and what the intervals mean."""
        read = ", ".join(name if name == key else f"{name} ({key})" for name, key in self.columns.items())
        return " ".join(
            (
                f"{self.rollouts:,} rollouts, {self.tokens:,} tokens. Read: {read}.",
                *([f"Not read: {', '.join(self.unread)}."] if self.unread else []),
                f"All intervals hold together at {100 * (1 - self.error_rate):g} %; the unit is a {self.unit}, of "
                f"which there are {self.units:,}.",
                *self.notes,
            )
        )

    def to_text(self, terminal: Terminal = PLAIN) -> str:
        """Return the report for people."""
        return "\n".join(self._lines(terminal)) + "\n"

    def _lines(self, terminal: Terminal) -> Iterator[str]:
        yield visible(f"{self.source}: {self.first_line()}", keep="")
        found = [(one.status, one.question, visible(one.message), one.related) for one in self.answers]
        yield from by_status(STATUSES, found, terminal)
        yield from wrap(visible(self.facts()), terminal)
