'''Claims of an experiment: a sentence, what is expected, what was found, and the verdict.

An analysis has `claims = Claims(NAME)` and a function for each claim, in the order of the summary. Its docstring is the
claim; the decorator has the source, what is expected and the tolerance::

    @claims.add("theory", "about 1/T of the gradient", "1.1/T: tokens differ in context")
    def _last(rows):
        """the last token alone"""
        long = need(rows, "length")
        most = (long["last"] * long["length"]).max()
        return f"at most {most:.2f}/T", most < 1.1

It returns what was found, in words, and whether that is as expected. `need` raises Missing if rows are not there: the
claim was then not run. If all that is claimed is that a column stays below a limit, or between two, `bound` and
`between` say so in one call::

    claims.bound("two routes agree", "theory", "equal", "1e-9: float64", "off_again", 1e-9, "length")
    claims.between("k1 and k3 agree", OWN, "1", "10 %", "{low:.2f} to {high:.2f}", "ratio", above=0.9, below=1.1)
'''

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from kltest.reproduce.frames import Missing, Rows, frame, known, need

LEFT_OUT = "left out by --only"
Answer = tuple[str, Any]
Judge = Callable[..., Answer]
# A column, or what is worked out from a frame.
Column = str | Callable[[pd.DataFrame], pd.Series]
# The source of a claim that nobody has made before.
OWN = "this work"
AT_MOST = "at most {high:.1e}, of {count}"


@dataclass(frozen=True)
class Claim:
    """One row of the summary. `agrees` is None if the claim was not run; `found` then says why."""

    experiment: str
    claim: str
    source: str
    expected: str
    found: str
    agrees: bool | None
    tolerance: str = ""

    @property
    def verdict(self) -> str:
        """The first cell of the row in the summary."""
        if self.found == LEFT_OUT:
            return "not asked for"
        return {True: "yes", False: "NO", None: "not run"}[self.agrees]


@dataclass(frozen=True)
class Claims:
    """The claims of an experiment; called with its rows, a Claim for each."""

    experiment: str
    questions: list[tuple[str, str, str | Callable[[pd.DataFrame], str], str, Judge]] = field(default_factory=list)

    def add(
        self, source: str, expected: str | Callable[[pd.DataFrame], str], tolerance: str = "", *, claim: str = ""
    ) -> Callable[[Judge], Judge]:
        """Decorate the function that judges a claim, which is its docstring unless given.

        `expected` may be worked out from the rows.
        """

        def added(judge: Judge) -> Judge:
            words = claim or " ".join((judge.__doc__ or "").split())
            self.questions.append((words, source, expected, tolerance, judge))
            return judge

        return added

    def between(
        self, claim: str, source: str, expected: str, tolerance: str, said: str, of: Column, part: Any = None, *,
        above: float = -math.inf, below: float = math.inf, **wanted: Any,
    ) -> None:  # fmt: skip
        """Claim that a column of the rows wanted, or what is worked out from them, lies between two limits.

        `said` is what was found: a format of `low`, `high`, `total` and `count`, the extremes, the sum and the number
        of known values. Conditions that hold are ones: above 0.5 all of them do, below 0.5 none.
        """

        def judge(rows: pd.DataFrame, *which: Any) -> Answer:
            found = need(rows, part, **wanted)
            values = known((of(found) if callable(of) else found[of]).dropna())
            low, high = values.min(), values.max()
            words = said.format(low=low, high=high, total=values.sum(), count=len(values))
            return words, above < low and high < below

        self.add(source, expected, tolerance, claim=claim)(judge)

    def bound(
        self, claim: str, source: str, expected: str, tolerance: str, of: Column, limit: float, part: Any = None,
        **wanted: Any,
    ) -> None:  # fmt: skip
        """Claim that a column, or what is worked out from rows, stays below a limit in size."""

        def sizes(found: pd.DataFrame) -> pd.Series:
            return (of(found) if callable(of) else found[of]).dropna().abs()

        self.between(claim, source, expected, tolerance, AT_MOST, sizes, part, below=limit, **wanted)

    def __call__(self, rows: Rows, *which: Any, suffix: str = "") -> list[Claim]:
        """Judge every claim. `which` is handed on to the judges; `suffix` is added to the claims' sentences."""
        whole, found = frame(rows), []
        for claim, source, expected, tolerance, judge in self.questions:
            agrees: bool | None
            try:
                said, holds = judge(whole, *which)
                agrees = bool(holds)
            except Missing:
                said, agrees = "not run", None
            wanted = expected if isinstance(expected, str) else expected(whole)
            found.append(Claim(self.experiment, claim + suffix, source, wanted, said, agrees, tolerance))
        return found


def score(claims: Sequence[Claim]) -> float | None:
    """Return the share of the claims that were run and agree; None if none was run."""
    judged = [claim.agrees for claim in claims if claim.agrees is not None]
    return sum(judged) / len(judged) if judged else None
