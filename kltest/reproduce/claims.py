'''Claims of an experiment: a sentence, the inequalities that are its test, what was measured, and the verdict.

An analysis has `claims = Claims(NAME)` and a function for each claim, in the order of the summary. It measures; the
decorator has the source, the reason of the tolerance, and a bound for each quantity that is measured. The docstring is
the sentence; its numbers are slots for these bounds and for the function's further arguments::

    @claims.measure(OWN, "tokens differ in context", times=below(1.1), length=at_least(100))
    def _last(rows, length):
        """for T from {length} on the last token alone has at most {times}/T of the gradient"""
        long = need(rows, "length", length=length)
        return {"times": long["last"] * long["length"]}

So a sentence and its test have the same numbers, and the bounds alone decide if a claim agrees. A formula stands in
backquotes; any other number that is written out is refused. What is returned beside the quantities with bounds is
reported and not judged. `need` raises Missing if rows are not there: the claim was then not run.
'''

import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from kltest.reproduce.bounds import Bound, figure
from kltest.reproduce.frames import Missing, Rows, frame, require

LEFT_OUT = "left out by --only"
Judge = Callable[[pd.DataFrame], tuple[str, bool]]
Measured = Mapping[str, Any]
# The source of a claim that is derived or measured here; the paper says what others had before.
OWN = "this work"


@dataclass(frozen=True)
class Claim:
    """One row of the summary. `expected` is the inequality that was tested, `tolerance` the reason of its bound.

    `agrees` is None if the claim was not run; `found` then says why.
    """

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
    questions: list[tuple[str, str, str, str, Judge]] = field(default_factory=list)

    def measure(self, source: str, why: str, *, claim: str = "", **given: Any) -> Callable[[Any], Any]:
        """Decorate the function that measures what a claim bounds; the claim is its docstring unless given.

        Args:
            source: who said it first.
            why: the reason of the tolerance.
            claim: the sentence, with slots for what is given.
            **given: for each parameter of the function beside the rows its value (a Bound selects rows), and for each
                quantity that is judged its Bound.

        Raises:
            ValueError: nothing is judged, or the sentence has a number that is not given.
        """

        def added(measured: Callable[..., Measured]) -> Callable[..., Measured]:
            names = inspect.signature(measured).parameters
            scope = {name: one for name, one in given.items() if name in names}
            bounds = {name: one for name, one in given.items() if name not in names}

            def judge(rows: pd.DataFrame) -> tuple[str, bool]:
                found = {name: _values(one) for name, one in measured(rows, **scope).items()}
                require(all(len(found[name]) for name in bounds))
                said = (f"{_label(name)}: {_shown(values, bounds.get(name))}" for name, values in found.items())
                return "; ".join(said), all(bool(np.all(bound(found[name]))) for name, bound in bounds.items())

            sentence = written(claim or measured.__doc__ or "", **given)
            self.questions.append((sentence, source, inequality(bounds, scope), why, judge))
            return measured

        return added

    def __call__(self, rows: Rows, *, suffix: str = "") -> list[Claim]:
        """Judge every claim; `suffix` is added to the sentences."""
        whole, found = frame(rows), []
        for claim, source, tested, why, judge in self.questions:
            agrees: bool | None
            try:
                said, agrees = judge(whole)
            except Missing:
                said, agrees = "not run", None
            found.append(Claim(self.experiment, claim + suffix, source, tested, said, agrees, why))
        return found


# A number that is no part of a name (k1, float32) and no power.
NUMBER = re.compile(
    r"(?<![\w−-])[\d.]*\d|%|\b(half|twice|(a|one|two) (third|quarter|fifth|tenth)s?|ten|twenty|(hundred|thousand)\w*)\b"
)
FORMULA = re.compile(r"`[^`]*[^\d\s.,%`][^`]*`")


def written(sentence: str, **given: Any) -> str:
    """Return a claim's sentence with what is given in its slots; ValueError if it has other numbers."""
    literal = "".join(text for text, *_ in string.Formatter().parse(sentence))
    if other := NUMBER.search(FORMULA.sub("", literal)):
        raise ValueError(f"{other[0]!r} is no bound of the claim {sentence!r}")
    words = {name: ", ".join(map(str, one)) if isinstance(one, tuple) else one for name, one in given.items()}
    return " ".join(sentence.format(**words).replace("`", "").split())


def inequality(bounds: Mapping[str, Bound], scope: Mapping[str, Any]) -> str:
    """Return what is tested, and where; ValueError if nothing is."""
    if not bounds or not all(isinstance(bound, Bound) for bound in bounds.values()):
        raise ValueError(f"each quantity needs a bound, a claim at least one: {dict(bounds)}")
    words = (
        one.of(_label(name)) if isinstance(one, Bound) else f"{_label(name)} {_scope(one)}"
        for name, one in scope.items()
        if isinstance(one, Bound) or not callable(one)
    )
    where = "; ".join(words)
    return "; ".join(bound.of(_label(name)) for name, bound in bounds.items()) + (f" (where {where})" if where else "")


def _scope(value: Any) -> str:
    if isinstance(value, float):
        return figure(value)
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _label(name: str) -> str:
    return name.replace("_", " ") if name.isidentifier() else name


def _values(found: Any) -> np.ndarray:
    """Return what was measured as numbers, truths or words."""
    values = np.ravel(np.asarray(found))
    return values if values.dtype.kind in "biU" else values.astype(float)


def _shown(values: np.ndarray, bound: Bound | None) -> str:
    if values.dtype.kind == "U" or not len(values):
        return ", ".join(values) or "none"
    if values.dtype.kind == "b":
        return f"{values.sum()} of {len(values)}"
    low, high = (figure(one, "," if values.dtype.kind == "i" else ".3g") for one in (values.min(), values.max()))
    if len(values) == 1:
        return high
    if bound is not None and bound.near == 0:
        return f"at most {figure(abs(values).max(), '.2g')}, of {len(values)}"
    return f"{low} to {high}, of {len(values)}"


def score(claims: Sequence[Claim]) -> float | None:
    """Return the share of the claims that were run and agree; None if none was run."""
    judged = [claim.agrees for claim in claims if claim.agrees is not None]
    return sum(judged) / len(judged) if judged else None
