"""Naming the gradient that a loss follows, and judging it: identification, checks, verdict, report.

Loaded when asked for, since the words of the checks (`kltest explain`) need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kltest import render  # noqa: F401 (with it, a report can show itself)
from kltest.report import Report

if TYPE_CHECKING:
    from kltest.grading.grader import grade

__all__ = ["Report", "grade"]


def __getattr__(name: str) -> Any:
    if name == "grade":
        from kltest.grading.grader import grade

        return grade
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
