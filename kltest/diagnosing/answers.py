"""Answers to questions about logs of rollouts."""

from dataclasses import dataclass, field

import numpy as np

from kltest.diagnosing.intervals import Estimate
from kltest.diagnosing.logs import Logs

FINDING, NOTHING, REPORTED = "finding", "nothing found", "reported"
INCONCLUSIVE, NOT_LOOKED_AT = "inconclusive", "not looked at"
STATUSES = (FINDING, INCONCLUSIVE, REPORTED, NOTHING, NOT_LOOKED_AT)

SAME = 1e-6
"""Log-probs that differ by less are copies of each other."""
SHARE = 0.999
"""Share of tokens from which on it is said of all."""


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
    numbers: dict[str, Estimate | float] = field(default_factory=dict)
    related: str = ""


def needs(question: str, columns: str) -> Answer:
    """Return the answer to a question that the file has no columns for."""
    return Answer(question, NOT_LOOKED_AT, f"needs {columns}")


def are_copies(logs: Logs, one: str, other: str) -> bool:
    """Return whether two columns of log-probs are equal at nearly all tokens, and not all of them are 0."""
    equal = np.abs(logs.gap(one, other))[logs.live] <= SAME
    return bool(equal.mean() >= SHARE)
