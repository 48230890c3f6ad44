"""Questions to logs of rollouts, the columns that each needs, and their answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kltest.diagnosing.intervals import Estimate, Units
from kltest.diagnosing.logs import Logs

FINDING, INCONCLUSIVE, REPORTED = "finding", "inconclusive", "reported"
NOTHING, NOT_LOOKED_AT = "nothing found", "not looked at"
STATUSES = (FINDING, INCONCLUSIVE, REPORTED, NOTHING, NOT_LOOKED_AT)


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        question: Its name.
        status: One of STATUSES.
        message: A sentence or two.
        numbers: Estimates with intervals, and plain facts of these rollouts, by name.
        related: Code of the check that explains it.
    """

    question: str
    status: str
    message: str
    numbers: dict[str, Any] = field(default_factory=dict)
    related: str = ""


Asked = Callable[[Logs, Units], Answer]
QUESTIONS: dict[str, Asked] = {}
"""All questions, in the order of the report."""


WORDS = {"group": "several rollouts of a prompt"}


def question(name: str, *needs: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Register a question that needs some columns; `a|b` is the first of them that is there.

    Its function is called with the logs, the units and the fields of these columns.
    """

    def registered(function: Callable[..., Answer]) -> Callable[..., Answer]:
        def asked(logs: Logs, units: Units) -> Answer:
            found = [logs.first(*each.split("|")) for each in needs]
            if None in found:
                lacking = (each.replace("|", " or ") for each, one in zip(needs, found, strict=True) if one is None)
                words = ", ".join(WORDS.get(each, each) for each in lacking)
                unused = (logs.unused(each) for need in needs for each in need.split("|"))
                return missing(name, "; ".join([words, *filter(None, unused)]))
            return function(logs, units, *found)

        QUESTIONS[name] = asked
        return function

    return registered


def missing(name: str, what: str) -> Answer:
    """Return the answer to a question that the file has no columns for."""
    return Answer(name, NOT_LOOKED_AT, f"needs {what}")


def judged(found: Estimate, low: float = float("-inf"), high: float = float("inf")) -> str:
    """Return a finding if an estimate is surely outside two bounds, nothing if surely within, else inconclusive."""
    if found.high < low or found.low > high:
        return FINDING
    return NOTHING if low <= found.low and found.high <= high else INCONCLUSIVE
