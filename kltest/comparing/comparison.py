"""The result of a comparison as plain data: text, and JSON in the schema kltest.same/1."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kltest.comparing.differences import Difference
from kltest.errors import KltestError
from kltest.report import Published

# Differences, and reasons why something was not tried, that are listed in the text.
LISTED = 4


@dataclass(frozen=True)
class Tried:
    """One batch: what was compared there, with what result; `why` says what kept it from being compared."""

    family: str
    batch: str
    status: Literal["same", "differ", "not tried"]
    why: str = ""
    differences: list[Difference] = field(default_factory=list)

    @property
    def at_padding(self) -> bool:
        """True if all that differs stands at padded positions."""
        return all(one.at_padding for one in self.differences)


@dataclass
class Comparison(Published):
    """Whether two losses are the same function, on what was tried.

    Attributes:
        a, b: Their names.
        seed: Seed of the batches.
        verdict: "same", "differ", or "undecided" if nothing could be compared, or a loss does not repeat itself.
        tried: Every batch, the small ones first.
        reason: Why it is undecided.
        explained: One factor or summand that explains all differences, in words.
        smallest: The smallest batch on which they differ, and what differs there.
        program: Standalone program that shows it; `unwritten` says why there is none.
        notes: Sentences on what was compared otherwise, or not.
    """

    SCHEMA = "kltest.same/1"
    CODES: ClassVar = {"same": 0, "differ": 1, "undecided": 4}
    a: str
    b: str
    seed: int
    verdict: Literal["same", "differ", "undecided"] = "undecided"
    tried: list[Tried] = field(default_factory=list)
    reason: str = ""
    explained: str = ""
    smallest: Tried | None = None
    program: str = ""
    unwritten: str = ""
    notes: list[str] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)

    def raise_for_failure(self) -> None:
        """Raise KltestError unless they are the same."""
        if self.verdict != "same":
            raise KltestError(self.to_text())

    def to_text(self) -> str:
        """Return the report for people."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        compared = [one for one in self.tried if one.status != "not tried"]
        differ = [one for one in compared if one.status == "differ"]
        left = f"; {len(self.tried) - len(compared)} were not" if len(compared) < len(self.tried) else ""
        first = {
            "same": f"SAME: equal on all {len(compared)} batches that were compared{left}",
            "differ": f"DIFFER: on {len(differ)} of {len(compared)} batches that were compared{left}",
            "undecided": f"UNDECIDED: {self.reason}",
        }
        yield first[self.verdict]
        yield from (f"A         {self.a}", f"B         {self.b}")
        if self.explained:
            yield f"explained {self.explained}: all differences, but not the same"
        for what, count in Counter(part.what for one in differ for part in one.differences).most_common():
            yield f"differs   {what}, on {count}"
        if compared:
            yield f"compared  {self._by_family(differ)}"
        reasons = Counter(one.why for one in self.tried if one.status == "not tried")
        for why, count in reasons.most_common(LISTED):
            where = ", ".join(dict.fromkeys(one.family for one in self.tried if one.why == why))
            yield f"not tried {count} of {where}: {why}"
        if len(reasons) > LISTED:
            yield f"not tried and others, for {len(reasons) - LISTED} more reasons: --output json lists them"
        yield from (f"note      {note}" for note in self.notes)
        if self.smallest is not None:
            yield f"smallest  {self.smallest.batch}"
            yield from (f"          {one.words}" for one in self.smallest.differences[:LISTED])
        if self.unwritten:
            yield f"          no program: {self.unwritten}"
        if self.program:
            yield from ("", self.program)

    def _by_family(self, differ: list[Tried]) -> str:
        """Return how many batches of each kind were compared, and on how many of them they differ."""
        compared = Counter(one.family for one in self.tried if one.status != "not tried")
        wrong = Counter(one.family for one in differ)
        return ", ".join(
            f"{family} {count}" + (f" ({wrong[family]} differ)" if wrong[family] else "")
            for family, count in compared.items()
        )
