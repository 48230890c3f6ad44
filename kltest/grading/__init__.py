"""Naming the gradient that a loss follows, and judging it: identification, checks, verdict, report."""

from kltest import render  # noqa: F401 (with it, a report can show itself)
